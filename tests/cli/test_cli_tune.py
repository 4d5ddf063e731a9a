"""``outrider tune``, ``outrider config`` and ``outrider.toml`` in the other commands."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_machine import SimulatedMachine
from typer.testing import Result

from outrider.cli.tune import _NgramTable, _write
from outrider.lab.bench import plan_of
from outrider.lab.metadata import hardware
from outrider.lab.model_files import fingerprint
from outrider.lab.tune.machine import Source
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings

Run = Callable[..., Result]

TABLE = "num_speculative_tokens_per_batch_size = [[1, 1, 4], [2, 2, 2], [3, 64, 0]]"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"def f{i}(x): return x + {i}\n" for i in range(8)))
    return file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def written(pair: tuple[Path, Path], here: Path) -> Path:
    """A configuration for the tiny pair, in the working directory."""
    target, draft = pair
    lines = [
        f"target = {json.dumps(str(target))}",
        f"draft = {json.dumps(str(draft))}",
        'method = "block"',
        TABLE,
        "[settings]",
        'dtype = "float32"',
        'device = "cpu"',
        "[fingerprints]",
        f"hardware = {json.dumps(hardware())}",
        f'target = "{fingerprint(str(target), "target")}"',
        f'{json.dumps(f"draft {draft}")} = "{fingerprint(str(draft), "draft")}"',
    ]
    file = here / "outrider.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_tune_writes_what_generate_and_bench_read(
    pair: tuple[Path, Path], run: Run, prompts: Path, here: Path
) -> None:
    pytest.importorskip("matplotlib")
    target, draft = pair
    result = run(
        "tune", "--target", target, "--draft", draft, "--data", prompts, "--dtype", "float32",
        "--device", "cpu", "--batch-size", 1, "--batch-size", 2, "-n", 24, "--minutes", 2,
        "--num-speculative-tokens", 3, "--limit", 2, "--method", "speculative", "--method",
        "prompt-lookup", "--ignore-eos", "--plot", "plot.svg",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "wrote outrider.toml" in result.stderr
    assert result.stdout.startswith(("Use ", "Do not speculate: "))
    assert "predicted" in result.stdout
    assert (here / "plot.svg").read_text().startswith("<?xml")
    values = tomllib.loads((here / "outrider.toml").read_text())
    assert values["target"] == str(target)
    assert values["settings"] == {"dtype": "float32", "device": "cpu"}
    assert values["tuned_at_temperature"] == 0
    assert "tuned_with_truncation" not in values
    after = run("generate", "def f(x):", "--max-new-tokens", 4, "--json")
    assert after.exit_code == 0, after.output
    assert "using outrider.toml" in after.stderr


def test_tune_as_json(pair: tuple[Path, Path], run: Run, prompts: Path, here: Path) -> None:
    target, draft = pair
    result = run(
        "tune", "--target", target, "--draft", draft, "--data", prompts, "--dtype", "float32",
        "--device", "cpu", "--batch-size", 1, "-n", 24, "--minutes", 2, "--limit", 2,
        "--num-speculative-tokens", 2, "--json", "-o", "mine.toml", "--ignore-eos",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["configurations"][0]["source"] == "plain decoding"
    assert {each["name"] for each in document["sources"]} >= {"prompt lookup", "suffix decoding"}
    assert (here / "mine.toml").is_file()


@pytest.mark.parametrize("speed", [0.95, 0.0])
def test_the_last_table_stays_until_the_configuration_names_another(
    here: Path, speed: float
) -> None:
    """A table that is not worth it is dropped, and one of an interrupted tuning."""
    table = _NgramTable(here / "outrider.toml")
    table.file.write_bytes(b"old")
    sources = [
        Source("drafts", "speculative", "embedded"),
        Source("table", f"ngram:file={table.counted}"),
    ]
    machine = SimulatedMachine(
        {"drafts": [0.8] * 8, "table": [speed] * 8},
        dict.fromkeys(("drafts", "table"), lambda rows: 0.001),
        lambda rows, width: 0.02,
    )
    plan = plan_of({"methods": ["plain"], "data": ["builtin:code"]})
    with table:
        table.counted.write_bytes(b"new")
        tuning = Tuner(machine, sources, TuneSettings((1,), 60)).run()
        assert table.file.read_bytes() == b"old"
        _write(tuning, plan, here / "outrider.toml", table)
    values = tomllib.loads((here / "outrider.toml").read_text())
    if speed:
        assert table.file.read_bytes() == b"new"
        assert values["options"] == {"file": str(table.file)}
        measured = {each["method"] for each in values["measured"]}
        assert measured == {f"ngram:file={table.file}"}
    else:
        assert table.file.read_bytes() == b"old"
        assert values["method"] == "speculative"
    assert table.named(f'"ngram:file={table.counted}"') == f'"ngram:file={table.file}"'
    assert sorted(each.name for each in here.iterdir()) == ["outrider.ngram", "outrider.toml"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--minutes", 0), "--minutes 0.0: must be above 0"),
        (("--minutes", 1e-5), "too short to measure anything"),
        (("--metric", "taste"), "--metric taste: must be exact_match, rouge_l or bleu"),
        (("--references", "r.txt"), "add --metric NAME"),
        (("--metric", "exact_match", "--at-least", 2), "--at-least 2.0: must be above 0"),
        (("--export", "sglang"), "--export 'sglang': must be vllm, transformers or llama.cpp"),
        (("--export", "vllm", "--json"), "--export and --json both print to stdout"),
        (("--method", "suffix:corpus_tokens=9"), "write corpus_tokens=0"),
        (("--method", "plain"), "there is nothing to choose from"),
        (("--method", "block:draft_confidence=0.4"), "tuning chooses the draft lengths itself"),
        (("--plot", "plot.pdf"), "must end in .svg or .png"),
        (("-o", "nowhere/outrider.toml"), "there is no folder nowhere"),
        (("-n", 4), "--max-new-tokens 4: must be 24 or more"),
        (("--method", "lenience:lenience=0.5", "--temperature", 1), "pass a divergence budget"),
        (("--method", "eagle3"), "needs a head of kind 'eagle3'"),
        (("--method", "nonsense"), "unknown method 'nonsense'"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...],
    problem: str,
    pair: tuple[Path, Path],
    run: Run,
    prompts: Path,
    here: Path,
) -> None:
    target, draft = pair
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
    result = run("tune", *models, "--data", prompts, "--batch-size", 1, *arguments)
    assert result.exit_code == 2, result.output
    assert problem in result.stderr
    assert not (here / "outrider.toml").exists()


def test_no_prompts(pair: tuple[Path, Path], run: Run, here: Path) -> None:
    target, draft = pair
    none = run("tune", "--target", target, "--draft", draft)
    assert none.exit_code == 2
    assert "no prompts: pass --data FILE" in none.stderr
    (here / "one.txt").write_text("x\n")
    short = run("tune", "--target", target, "--draft", draft, "--data", "one.txt")
    assert short.exit_code == 2
    assert "the prompt has a single token" in short.stderr


# ---------------------------------------------------------------------------- the other commands


def drafted(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_generate_reads_the_file_of_the_working_directory(written: Path, run: Run) -> None:
    result = run("generate", "def f(x):", "--max-new-tokens", 8, "--json")
    assert drafted(result)["method"] == "block"
    assert "using outrider.toml: method block" in result.stderr
    elsewhere = written.rename(written.with_name("mine.toml"))
    assert "using" not in run("generate", "def f(x):", "--max-new-tokens", 2).stderr
    named = run("generate", "def f(x):", "--max-new-tokens", 8, "--json", "--config", elsewhere)
    assert drafted(named)["method"] == "block"


def test_options_replace_the_files_values(written: Path, run: Run, pair: tuple[Path, Path]) -> None:
    own = run("generate", "def f(x):", "--max-new-tokens", 8, "--json", "--method", "suffix")
    assert drafted(own)["method"] == "suffix"
    assert "using outrider.toml for the target and how it runs" in own.stderr
    other = run("generate", "x = 1", "--max-new-tokens", 4, "--target", pair[1], "--draft", pair[1])
    assert other.exit_code == 0, other.output
    assert f"note: outrider.toml is for target {pair[0]}, so nothing of it is used" in other.stderr


@pytest.mark.parametrize(
    "option", [("--num-speculative-tokens", 2), ("--draft-length", "heuristic")]
)
def test_a_length_of_ones_own_leaves_the_files_method_and_draft(
    written: Path, run: Run, option: tuple[object, ...]
) -> None:
    result = run("generate", "def f(x):", "--max-new-tokens", 8, "--json", *option)
    assert drafted(result)["method"] == "block"
    assert "using outrider.toml: method block, with the lengths of the options" in result.stderr


def test_a_plan_does_not_depend_on_the_working_directory(
    written: Path, run: Run, prompts: Path, pair: tuple[Path, Path]
) -> None:
    """Unless the user names the configuration."""
    (written.parent / "plan.toml").write_text(
        f'target = "{pair[0]}"\ndata = ["{prompts}"]\nrepeats = 1\nmax_repeats = 1\n'
        'warmup = 0\nmax_new_tokens = 2\ndtype = "float32"\ndevice = "cpu"\n'
        f'drafts = ["{pair[1]}"]\n'
    )
    alone = run("bench", "--plan", "plan.toml", "--limit", 1, "--json", "-o", "out")
    assert alone.exit_code == 0, alone.output
    assert "outrider.toml" not in alone.stderr
    named = run(
        "bench", "--plan", "plan.toml", "--limit", 1, "--json", "-o", "new", "--config", written
    )
    assert f"using {written}" in named.stderr


def test_a_quantized_draft_is_for_methods_with_a_draft_model(written: Path, run: Run) -> None:
    """``quantize_draft`` of the file does not stop a method that has none."""
    text = written.read_text().replace("[settings]", '[settings]\nquantize_draft = "int8"')
    written.write_text(text)
    own = run("generate", "def f(x):", "--max-new-tokens", 4, "--json", "--method", "suffix")
    assert drafted(own)["method"] == "suffix"
    written.write_text(text.replace('"block"', '"prompt-lookup"'))
    of_file = run("generate", "def f(x):", "--max-new-tokens", 4, "--json")
    assert drafted(of_file)["method"] == "prompt-lookup"
    given = run("generate", "def f(x):", "--max-new-tokens", 4, "--quantize-draft", "int8")
    assert given.exit_code == 2
    assert "has no draft model or head here" in given.stderr


def test_the_file_may_choose_plain_decoding(written: Path, run: Run) -> None:
    written.write_text(written.read_text().replace('"block"', '"plain"'))
    result = run("generate", "def f(x):", "--max-new-tokens", 4, "--compare")
    assert result.exit_code == 2
    assert "--compare compares a method with plain" in result.stderr


@pytest.mark.parametrize("line", ["hardware = ", 'target = "'])
def test_a_stale_file_is_said_to_be_stale(written: Path, run: Run, line: str) -> None:
    """The run goes on, without the file's draft lengths."""
    head, _, last = written.read_text().partition("[fingerprints]")
    lines = [f'{line.rstrip(chr(34))}"other"' if each.startswith(line) else each
             for each in last.splitlines()]  # fmt: skip
    written.write_text(head + "[fingerprints]" + "\n".join(lines))
    result = run("generate", "def f(x):", "--max-new-tokens", 8, "--json")
    assert drafted(result)["method"] == "block"
    assert "note: outrider.toml is stale: " in result.stderr
    assert "; the engine measures as it runs how many tokens pay" in result.stderr
    assert drafted(result)["stats"]["draft_lengths"]


@pytest.fixture
def lossy(written: Path) -> Path:
    """The configuration with a lossy method, which was tuned at temperature 0.8."""
    text = written.read_text().replace('"block"', '"mentored"\ntuned_at_temperature = 0.8')
    written.write_text(text)
    return written


UNMEASURED = "note: outrider.toml: method mentored is lossy and was tuned at temperature 0.8; "


def test_a_lossy_method_at_another_temperature_is_noted_once(lossy: Path, run: Run) -> None:
    prompt = ("def f(x):", "--max-new-tokens", 4)
    for given, at in ((("--temperature", 0.5), "0.5"), ((), "1")):
        result = run("generate", *prompt, *given)
        assert result.exit_code == 0, result.output
        assert result.stderr.count(UNMEASURED) == 1
        assert f"diverges from the target at {at} was not measured" in result.stderr
    own_length = run("generate", *prompt, "--num-speculative-tokens", 2)
    assert own_length.stderr.count(UNMEASURED) == 1
    for given in (("--temperature", 0.8), ("--temperature", 0), ("--method", "suffix")):
        result = run("generate", *prompt, *given)
        assert result.exit_code == 0, result.output
        assert "is lossy" not in result.stderr


def test_other_commands_note_the_temperature_of_a_lossy_method(
    lossy: Path, run: Run, prompts: Path
) -> None:
    bench = (
        "bench", "--data", prompts, "--limit", 1, "--max-new-tokens", 4, "--repeats", 1,
        "--max-repeats", 1, "--warmup", 0, "-o", "out",
    )  # fmt: skip
    assert run(*bench, "--temperature", 0.5).stderr.count(UNMEASURED) == 1
    assert UNMEASURED not in run(*bench, "--temperature", 0.8).stderr
    refused = run("serve", "--replicas", 2, "--port", 0)  # after the note
    assert refused.stderr.count(UNMEASURED) == 1
    assert "diverges from the target at others was not measured" in refused.stderr
    batch = ("batch", prompts, "-o", "answers.jsonl", "--overwrite", "--max-new-tokens", 2)
    named = run(*batch, "--temperature", 0.5, "--config", lossy)
    assert "tuned at temperature 0.8" in named.stderr, named.output


def test_bench_measures_the_method_of_the_file(written: Path, run: Run, prompts: Path) -> None:
    result = run(
        "bench", "--data", prompts, "--limit", 1, "--max-new-tokens", 4, "--repeats", 1,
        "--max-repeats", 1, "--warmup", 0, "--json", "-o", "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    methods = [json.loads(line)["cell"]["method"] for line in result.stdout.splitlines()]
    assert methods[0] == "plain"
    assert methods[1].startswith("block:draft_length=table:[[1,1,4]")
    assert "using outrider.toml" in result.stderr


def test_chat_reads_the_file(written: Path, run: Run) -> None:
    result = run("chat", input="hello\n")
    assert "using outrider.toml: method block" in result.stderr


def test_a_broken_file_is_an_error(here: Path, run: Run) -> None:
    (here / "outrider.toml").write_text("target = 3\n")
    result = run("generate", "def f(x):")
    assert result.exit_code == 2
    assert "configuration 'outrider.toml': target = 3: must be a text" in result.stderr


def test_exports(written: Path, run: Run) -> None:
    vllm = run("config", "export", "vllm")
    assert vllm.exit_code == 0, vllm.output
    values = json.loads(vllm.stdout)
    assert values["rejection_sample_method"] == "block"
    assert values["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 2, 2], [3, 64, 0]]
    refused = run("config", "export", "llama.cpp")
    assert refused.exit_code == 2
    assert "llama.cpp has no method like 'block'" in refused.stderr
    missing = run("config", "export", "vllm", "--config", "no.toml")
    assert missing.exit_code == 2
    assert "--config no.toml: no such file" in missing.stderr
