"""``outrider generate``: only the output on stdout, everything else on stderr."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import Result

from outrider import Sampling, load
from outrider.cli.trace import legend

Run = Callable[..., Result]
PROMPT = "def f3(x):"
SUMMARY = (
    r"8 tokens, \d+ tok/s \| acceptance length \d\.\d\d, rate \d+%, α \d\.\d\d \| end: length\n"
)


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> str:
    engine = load(*pair, dtype="float32", device="cpu")
    return engine.generate(PROMPT, Sampling(max_new_tokens=8)).text


def test_text_on_stdout_and_summary_on_stderr(generate: Run, expected: str) -> None:
    result = generate(PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected
    assert re.fullmatch(SUMMARY, result.stderr)


def test_prompt_from_file_and_from_standard_input(
    generate: Run, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert generate("-f", file).stdout == expected
    assert generate("-", input=PROMPT).stdout == expected
    assert generate("-f", "-", input=PROMPT).stdout == expected


def test_json_is_one_document(generate: Run, expected: str) -> None:
    result = generate(PROMPT, "--json", "--logprobs", 2, "--compare", "--temperature", 0)
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    for name in ("tokens", "token_ids", "origins", "logprobs", "top_logprobs"):
        assert len(document[name]) == 8
    assert all(len(top) == 2 for top in document["top_logprobs"])
    assert document["prompt"] == PROMPT
    assert document["finish_reason"] == "length"
    assert document["stats"]["emitted"] == 8
    assert document["comparison"]["identical"] is True
    assert document["comparison"]["text"] == document["text"]
    assert document["comparison"]["speedup"] > 0
    assert json.loads(generate(PROMPT, "--json").stdout)["text"] == expected


def test_json_says_how_the_output_was_generated(generate: Run, pair: tuple[Path, Path]) -> None:
    """Every key is documented, and the document suffices to reproduce the output."""
    target, draft = map(str, pair)
    given = ("--seed", 7, "--temperature", 0.7, "--top-k", 40, "--num-speculative-tokens", 3)
    mentored = ("--method", "mentored", "-o", "budget=0.2")
    document = json.loads(generate(PROMPT, "--json", *given, *mentored).stdout)
    expected = {
        "method": "mentored",
        "options": {"budget": "0.2"},
        "target": target,
        "draft": draft,
        "dtype": "float32",
        "device": "cpu",
        "num_speculative_tokens": 3,
        "temperature": 0.7,
        "top_k": 40,
        "seed": 7,
        "max_new_tokens": 8,
    }
    assert {name: document[name] for name in expected} == expected
    assert document["versions"]["torch"] == torch.__version__
    assert set(document["versions"]) == {"outrider", "torch", "transformers", "python"}
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(cells)) == [*document]
    plain = json.loads(generate(PROMPT, "--json", "--method", "plain").stdout)
    defaults = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert {name: plain[name] for name in defaults} == defaults
    assert (plain["draft"], plain["num_speculative_tokens"]) == (None, None)


def test_trace_marks_tokens_without_colour(generate: Run, expected: str) -> None:
    result = generate(PROMPT, "--trace", env={"NO_COLOR": "1", "TERM": "dumb"})
    assert "\x1b" not in result.output
    assert result.stderr.startswith("trace: accepted draft  [~correction]  [+bonus]")
    document = json.loads(generate(PROMPT, "--json").stdout)
    marks = {"correction": "[~", "bonus": "[+", "plain": "[="}
    assert all(marks[o] in result.stdout for o in set(document["origins"]) if o in marks)
    text = re.sub(r"\[[~+=](.*?)\](?=\[[~+=]|[^\]]|$)", r"\1", result.stdout)
    assert text == expected


def test_trace_colours_tokens(generate: Run, expected: str) -> None:
    result = generate(PROMPT, "--trace", env={"FORCE_COLOR": "1", "TERM": "xterm-256color"})
    assert "\x1b[1;37;41m" in result.stdout
    assert re.sub(r"\x1b\[[\d;]*m", "", result.stdout).replace("↵", "") == expected


def test_legend_fits_the_line() -> None:
    console = Console(no_color=True)
    with console.capture() as capture:
        console.print(legend(console), end="")
    assert len(capture.get()) <= 80


def test_trace_of_a_text_cut_at_a_stop_string(generate: Run, expected: str) -> None:
    stop = expected[3:5]
    result = generate(PROMPT, "--trace", "--stop", stop, env={"FORCE_COLOR": "1"})
    plain = re.sub(r"\x1b\[[\d;]*m", "", result.stdout).replace("↵", "")
    assert plain == expected[: expected.index(stop)]
    assert "end: stop" in result.stderr


def test_compare_prints_both_speeds(generate: Run) -> None:
    result = generate(PROMPT, "--compare", "--temperature", 0)
    assert result.exit_code == 0
    _, speeds, same = result.stderr.splitlines()
    assert re.fullmatch(r"plain [\d.]+ tok/s, speculative [\d.]+ tok/s: [\d.]+× the speed", speeds)
    assert same == "greedy outputs, plain and speculative: identical"


def test_options_reach_the_engine(generate: Run, pair: tuple[Path, Path]) -> None:
    ids = json.loads(generate(PROMPT, "--json", "--temperature", 0).stdout)["token_ids"]
    banned = generate(PROMPT, "--json", "--temperature", 0, "--logit-bias", f"{ids[0]}=-inf")
    assert json.loads(banned.stdout)["token_ids"][0] != ids[0]
    stopped = generate(PROMPT, "--json", "--temperature", 0, "--stop-token-id", ids[2])
    assert json.loads(stopped.stdout)["token_ids"] == ids[: ids.index(ids[2]) + 1]
    assert json.loads(stopped.stdout)["finish_reason"] == "stop"
    other = generate(PROMPT, "--json", "--seed", 1, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01)
    assert other.exit_code == 0
    plain = generate(PROMPT, "--json", "--method", "plain", "--temperature", 0)
    assert json.loads(plain.stdout)["token_ids"] == ids
    assert plain.stderr.startswith("note: method 'plain' uses no draft model; --draft ")


def test_the_generation_config_applies_and_is_named(
    generate: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its settings and rules apply unless a flag turns them off; options override them."""
    target = tmp_path / "target"
    shutil.copytree(pair[0], target)
    bare = generate(PROMPT, "--temperature", 0)
    words = [
        int(token)
        for token in json.loads(generate(PROMPT, "--json", "--temperature", 0).stdout)["token_ids"]
    ]
    file = target / "generation_config.json"
    settings = {"do_sample": False, "suppress_tokens": words, "eos_token_id": 0}
    file.write_text(json.dumps(settings))
    obedient = generate(PROMPT, "--target", target, "--compare")
    assert obedient.exit_code == 0
    assert obedient.stdout != bare.stdout
    assert "generation config: temperature 0.0, suppress_tokens [" in obedient.stderr
    assert "greedy outputs, plain and speculative: identical" in obedient.stderr
    free = generate(PROMPT, "--target", target, "--no-generation-config", "--temperature", 0)
    assert (free.stdout, "generation config" in free.stderr) == (bare.stdout, False)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_json_of_a_schema(generate: Run, tmp_path: Path, in_a_file: bool) -> None:
    schema = '{"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3}'
    if in_a_file:
        (tmp_path / "schema.json").write_text(schema)
    given = tmp_path / "schema.json" if in_a_file else schema
    done = generate("def f3(x):", "--json-schema", given, "-n", 60, "--temperature", 0.5)
    assert done.exit_code == 0, done.stderr
    assert set(json.loads(done.stdout)) <= {1, 2}


def test_a_schema_that_cannot_be_read(generate: Run) -> None:
    for given, message in (("{", "json_schema: no valid JSON"), ("nowhere", "cannot read")):
        done = generate("x", "--json-schema", given)
        assert done.exit_code == 2
        assert message in done.stderr
