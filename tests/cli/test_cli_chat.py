"""``outrider chat`` and ``outrider generate --chat``: conversations by the model's own template."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CONTEXT
from test_cli_bad_input import assert_refused
from test_cli_process import HEED, environment
from transformers import AutoTokenizer
from typer.testing import Result

from outrider import Engine, Sampling, load
from outrider.cli import lines
from outrider.cli.conversation import Conversation

Run = Callable[..., Result]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a: ' }}{% endif %}"
)
MODEL = ("--dtype", "float32", "--device", "cpu", "--method", "suffix", "--temperature", 0)
SAMPLING = Sampling(temperature=0, max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="session")
def chatty(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template."""
    folder = Path(shutil.copytree(pair[0], tmp_path_factory.mktemp("chatty") / "target"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(chatty: Path) -> Engine:
    return load(chatty, None, "plain", dtype="float32", device="cpu")


@pytest.fixture
def chat(chatty: Path, run: Run) -> Run:
    """Runs ``outrider chat`` on lines of input, for eight tokens an answer."""

    def call(*said: str, options: tuple[object, ...] = ()) -> Result:
        given = (*MODEL, "-n", 8, "--ignore-eos", *options)
        return run("chat", "--target", chatty, *given, input="".join(f"{x}\n" for x in said))

    return call


@pytest.fixture
def ask(chatty: Path, run: Run) -> Run:
    """Runs ``outrider generate`` with the same model."""

    def call(*arguments: object, **keywords: Any) -> Result:
        given = (*MODEL, "-n", 8, "--ignore-eos")
        return run("generate", "--target", chatty, *given, *arguments, **keywords)

    return call


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}


# ------------------------------------------------------------------------------ generate --chat


def test_generate_answers_a_message(ask: Run, engine: Engine) -> None:
    wanted = engine.chat([user("hello")], SAMPLING)
    found = ask("--chat", "hello")
    assert (found.exit_code, found.stdout) == (0, wanted.text)
    assert ask("--chat", "-", input="hello").stdout == wanted.text
    told = ask("--chat", "hello", "--system", "Be brief.", "--json")
    document = json.loads(told.stdout)
    assert document["prompt"] == [SYSTEM, user("hello")]
    assert document["prompt_ids"] == list(engine.encode([SYSTEM, user("hello")]))


def test_generate_compares_and_traces_answers(ask: Run, engine: Engine) -> None:
    compared = ask("--chat", "hello", "--compare")
    assert compared.exit_code == 0
    assert compared.stderr.endswith("greedy outputs, plain and suffix: identical\n")
    traced = ask("--chat", "hello", "--trace", env={"FORCE_COLOR": "1", "TERM": "xterm-256color"})
    text = re.sub(r"\x1b\[[\d;]*m", "", traced.stdout).replace("↵", "")
    assert text == engine.chat([user("hello")], SAMPLING).text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["x", "--chat", "hi"], ["--chat 'hi' and a PROMPT", "choose one"]),
        (["-f", "a.txt", "--chat", "hi"], ["--chat 'hi' and --file a.txt", "choose one"]),
        (["--chat", ""], ['--chat ""', "message is empty"]),
        (["x", "--system", "Be brief."], ["--system 'Be brief.' needs --chat"]),
        (["--chat", "hi", "--no-special-tokens"], ["--no-special-tokens", "leave one out"]),
    ],
)
def test_contradictory_prompts(ask: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(ask(*arguments), *parts)


@pytest.mark.parametrize("command", [("generate", "--chat", "hi"), ("chat",)])
def test_a_model_without_a_template(run: Run, pair: tuple[Path, Path], command: Any) -> None:
    refused = run(*command, "--target", pair[0], *MODEL)
    remedies = ("such as HuggingFaceTB/SmolLM2-135M-Instruct", "continue")
    assert_refused(refused, f"--target {pair[0]} has no chat template", *remedies)


def test_special_tokens_are_left_out_on_request(
    run: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """In all that is done with the prompt: also in the comparison with plain decoding."""
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    file = target / "tokenizer.json"
    settings = json.loads(file.read_text())
    token = "<|endoftext|>"
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": token, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
    }
    file.write_text(json.dumps(settings))
    given = ("generate", "def f3(x):", "--target", target, *MODEL, "-n", 8, "--json", "--compare")
    with_it, without = (
        json.loads(run(*given, *flag).stdout) for flag in ([], ["--no-special-tokens"])
    )
    assert with_it["prompt_ids"] == [0, *without["prompt_ids"]]
    assert without["comparison"]["identical"] is True
    assert with_it["comparison"]["identical"] is True
    assert without["text"] != with_it["text"]


# ----------------------------------------------------------------------------------------- chat


def test_answers_follow_the_whole_conversation(chat: Run, engine: Engine) -> None:
    """Each line is a message; only answers go to stdout."""
    first = engine.chat([user("hello")], SAMPLING).text
    second = engine.chat([user("hello"), assistant(first), user("and?")], SAMPLING).text
    found = chat("hello", "", "and?")
    assert (found.exit_code, found.stdout) == (0, f"{first}\n{second}\n")
    assert found.stderr == "note: cut after 8 tokens (--max-new-tokens)\n" * 2


def test_reset_and_system(chat: Run, engine: Engine) -> None:
    first = engine.chat([user("hello")], SAMPLING).text
    told = engine.chat([SYSTEM, user("hello")], SAMPLING).text
    later = engine.chat([SYSTEM, user("hello"), assistant(told), user("x")], SAMPLING).text
    found = chat(
        "hello", "/system Be brief.", "/reset", "hello", "x", '/system ""', "/reset", "hello"
    )
    assert found.stdout == f"{first}\n{told}\n{later}\n{first}\n"
    assert "system prompt: Be brief.\n" in found.stderr
    assert "no system prompt" in found.stderr
    assert chat("hello", options=("--system", "Be brief.")).stdout == f"{told}\n"
    assert "system prompt: Be brief.\n" in chat("/system", options=("--system", "Be brief.")).stderr


def test_stats_count_what_was_reused(chat: Run, engine: Engine) -> None:
    """By default the first turn's tokens are not read again; all of them are without the cache."""
    first = engine.chat([user("hello")], SAMPLING)
    later = engine.encode([user("hello"), assistant(first.text), user("and?")])
    read = (*first.prompt_ids, *first.token_ids)  # the text may be encoded otherwise than written
    shared = next(i for i, (old, new) in enumerate(zip(read, later)) if old != new)  # noqa: B905
    assert shared >= len(first.prompt_ids)
    for options, reused in (((), shared), (("--prefix-cache", "0"), 0)):
        found = chat("hello", "and?", "/stats", options=options).stderr
        rows = {
            line[:18].strip(): line[18:].split() for line in found.splitlines() if line[:1] != "n"
        }
        assert rows["answers"] == ["1", "2"]
        assert rows["tokens"] == ["8", "16"]
        assert rows["of these, reused"] == [str(reused), str(reused)]
        assert set(rows) >= {"tokens per second", "acceptance length", "acceptance rate"}
    assert chat("/stats").stderr == "no answer yet\n"


def test_trace_shows_the_last_answer_or_marks_the_next(chat: Run, engine: Engine) -> None:
    text = engine.chat([user("hello")], SAMPLING).text
    shown = chat("hello", "/trace")
    assert shown.stdout == f"{text}\n"
    assert "trace: accepted draft  [~correction]  [+bonus]" in shown.stderr
    assert re.search(r"^\d+ of \d+ draft tokens accepted in \d+ rounds$", shown.stderr, re.M)
    marked = chat("/trace on", "hello", "/trace off", "/reset", "hello").stdout.split("\n", 1)[0]
    assert marked != text.split("\n", 1)[0]
    assert chat("hello", options=("--trace",)).stdout.startswith(marked)


def test_help_and_exit(chat: Run) -> None:
    found = chat("/help", "/exit", "never read")
    assert (found.exit_code, found.stdout) == (0, "")
    for command in ("/stats", "/trace [on|off]", "/reset", "/system [TEXT]", "/help", "/exit"):
        assert f"  {command} " in found.stderr
    assert max(map(len, found.stderr.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("/bogus", ["'/bogus'", "/stats, /trace, /reset, /system, /help, /exit"]),
        ("/trace maybe", ["/trace maybe", "/trace on or /trace off"]),
        ("word " * 300, ["the prompt has", "the context 256", "shorten"]),
    ],
)
def test_wrong_lines_of_a_pipe_end_the_command(chat: Run, line: str, parts: list[str]) -> None:
    found = chat(line, "never read")
    assert_refused(found, *parts)
    assert max(map(len, found.stderr.splitlines())) <= 80 or "context" in found.stderr


def test_a_message_that_begins_with_a_slash(chat: Run, engine: Engine) -> None:
    assert chat("//stats").stdout == engine.chat([user("/stats")], SAMPLING).text + "\n"


def test_the_oldest_turns_are_dropped_where_the_context_is_full(chat: Run, engine: Engine) -> None:
    """Enough of them that not every turn drops one; the output is that of the turns left."""
    said = [f"{'hello world ' * 3}{number}" for number in range(12)]
    conversation = Conversation(engine, SAMPLING, system="Be brief.")
    expected, drops = "", []
    for message in said:
        dropped = conversation.make_room(message)
        room = CONTEXT - SAMPLING.max_new_tokens
        assert len(engine.encode(conversation.messages(message))) <= room
        drops.append(dropped)
        assert conversation.messages(message)[0] == SYSTEM
        expected += conversation.ask(message, lambda event: None).text + "\n"
    assert any(drops)
    first = next(number for number, dropped in enumerate(drops) if dropped)
    assert drops[first + 1] == 0
    assert len(conversation.turns) == 12 - sum(drops)
    found = chat(*said, options=("--system", "Be brief."))
    assert found.stdout == expected
    assert "note: the context of 256 tokens is full: the" in found.stderr
    assert "dropped (/reset drops all)\n" in found.stderr


# --------------------------------------------------------------------------- at the terminal


@pytest.fixture
def type_in(chat: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``outrider chat`` as at a terminal at which these lines are typed; an exception is a
    key such as Ctrl-C."""

    def call(*typed: "str | type[BaseException]", **options: Any) -> Result:
        keys = iter(typed)

        def pressed(prompt: str) -> str:
            key = next(keys)
            if isinstance(key, str):
                return key
            raise key

        monkeypatch.setattr(lines, "_asked", pressed)
        for module in ("lines", "chat"):
            monkeypatch.setattr(f"outrider.cli.{module}.is_interactive", lambda: True)
        return chat(**options)

    return call


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_control_keys_at_the_prompt_leave(type_in: Run, key: type[BaseException]) -> None:
    found = type_in(key)
    assert (found.exit_code, found.stdout) == (0, "")
    assert "/help lists commands" in found.stderr


def test_errors_do_not_end_a_conversation(type_in: Run, engine: Engine) -> None:
    """Nor do messages that failed belong to it."""
    found = type_in("/bogus", "word " * 300, "hello", EOFError)
    assert found.exit_code == 0
    assert found.stdout == engine.chat([user("hello")], SAMPLING).text + "\n"
    assert "error: unknown command '/bogus'" in found.stderr
    assert "error: the prompt has" in found.stderr


@pytest.fixture
def heeding() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also in a test run that its shell started in the background,
    where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch, heeding: None) -> None:
    """Ctrl-C after the third round of the first answer."""
    run, calls = Engine.run, iter([True])

    def interrupted(self: Engine, *arguments: Any, **options: Any) -> Iterator[Any]:
        first = next(calls, False)
        rows = run(self, *arguments, **options)
        for number, row in enumerate(rows):
            if number == 2 and first:
                signal.raise_signal(signal.SIGINT)
            yield row

    monkeypatch.setattr(Engine, "run", interrupted)


@pytest.mark.usefixtures("interrupting")
def test_ctrl_c_ends_an_answer_which_stays(type_in: Run, engine: Engine) -> None:
    """What was written is a part of the conversation, and of the retained prefix."""
    found = type_in("hello", "and?", "/stats", EOFError)
    assert found.exit_code == 0
    assert "note: interrupted; the answer so far stays" in found.stderr
    written = engine.chat([user("hello")], SAMPLING).text[: found.stdout.index("\n")]
    assert 0 < len(written) < len(engine.chat([user("hello")], SAMPLING).text)
    told = [user("hello"), assistant(written), user("and?")]
    assert found.stdout == f"{written}\n{engine.chat(told, SAMPLING).text}\n"
    (reused,) = (line.split()[-1] for line in found.stderr.splitlines() if "reused" in line)
    assert int(reused) >= len(engine.encode([user("hello")]))


@pytest.mark.usefixtures("heeding")
def test_ctrl_c_while_a_message_is_read_takes_it_back(
    type_in: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: there is no answer yet whose round would have to end."""
    run, calls = Engine.run, iter([True])

    def stuck(self: Engine, *arguments: Any, **options: Any) -> Iterator[Any]:
        if next(calls, False):
            signal.raise_signal(signal.SIGINT)
        yield from run(self, *arguments, **options)

    monkeypatch.setattr(Engine, "run", stuck)
    found = type_in("hello", "hello", EOFError)
    assert "interrupted before the answer began; the message does not count" in found.stderr
    assert found.stdout == engine.chat([user("hello")], SAMPLING).text + "\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heeding")
def test_a_second_ctrl_c_does_not_wait_for_the_round(
    type_in: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer stays as with the first one."""
    run, calls = Engine.run, iter([True])

    def stuck(self: Engine, *arguments: Any, **options: Any) -> Iterator[Any]:
        rows = run(self, *arguments, **options)
        for _ in range(4):
            yield next(rows)
        if next(calls, False):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one is not to be waited for")
        yield from rows

    monkeypatch.setattr(Engine, "run", stuck)
    found = type_in("hello", "/stats", EOFError)
    assert "note: interrupted; the answer so far stays" in found.stderr
    written = found.stdout.removesuffix("\n")
    assert written
    assert engine.chat([user("hello")], SAMPLING).text.startswith(written)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX terminals")
def test_a_real_terminal(chatty: Path) -> None:
    """The prompt, an answer, and Ctrl-D, through a pseudo-terminal."""
    import os
    import pty

    ours, theirs = pty.openpty()
    given = [*map(str, MODEL), "-n", "8", "--ignore-eos", "--target", str(chatty)]
    program = HEED + "from outrider.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "chat", *given],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="dumb", COLUMNS="80"),
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def wait_for(wanted: bytes) -> None:
        nonlocal seen
        while wanted not in seen:
            seen += os.read(ours, 4096)

    wait_for(b"> ")
    assert b"/help lists commands" in seen
    seen = b""
    os.write(ours, b"hello\n")
    wait_for(b"--max-new-tokens)\r\n")
    wait_for(b"> ")
    os.write(ours, b"\x04")
    assert process.wait() == 0
    os.close(ours)
    assert b"Traceback" not in seen


def test_a_lossy_method_that_was_tuned_at_another_temperature_is_noted(
    run: Run, chatty: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f'target = "{chatty}"\ndraft = "{pair[1]}"\nmethod = "mentored"\n'
        "tuned_at_temperature = 0.8\n"
    )
    chat = ("chat", "--config", file, "-n", 4, "--temperature")
    result = run(*chat, 0.5, input="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("is lossy and was tuned at temperature 0.8") == 1
    assert "is lossy" not in run(*chat, 0.8, input="hello\n").stderr
