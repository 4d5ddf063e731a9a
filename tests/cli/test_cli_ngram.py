"""``outrider ngram build``, and generation with the table that it builds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.drafters.ngram.table import NgramTable

Run = Callable[..., Result]
CODE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(30))


@pytest.fixture
def build(pair: tuple[Path, Path], run: Run, tmp_path: Path) -> Run:
    """The command with the tiny pair's tokenizer."""

    def call(*arguments: object) -> Result:
        models = ("--target", pair[0], "--dtype", "float32", "--device", "cpu")
        return run("ngram", "build", "--out", tmp_path / "file", *models, *arguments)

    return call


def test_from_text_to_a_draft(build: Run, generate: Run, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    done = build("--text", tmp_path / "code.py", "--order", 3)
    assert done.exit_code == 0, done.output
    assert "of order 3" in done.output
    assert NgramTable.open(tmp_path / "file").order == 3
    option = f"file={tmp_path / 'file'}"
    greedy = ("def f", "--temperature", 0)
    drafted = generate(*greedy, "--method", "ngram", "-o", option, "-o", "draw=argmax")
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == generate(*greedy, "--method", "plain").stdout


def test_from_the_targets_own_samples(build: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("def f\nclass A\n")
    prompts = ("--file", tmp_path / "prompts", "--max-new-tokens", 16)
    done = build("--from-samples", 100, "--json", *prompts)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert len(told["grams"]) == 4
    assert 100 <= told["tokens"] < 100 + 32 * 20
    assert told["sampled"] == 100
    context = told["tokens"] - 100  # at most four prompt tokens for each sample
    assert 7 <= context <= 4 * 100
    said = build("--from-samples", 100, *prompts).stderr
    assert f"{told['tokens']} tokens, 100 of them written by the target and {context} of" in said
    assert build("--from-samples", 20, "--max-new-tokens", 8).exit_code == 0


def test_what_is_missing_is_named(build: Run, run: Run, tmp_path: Path) -> None:
    for arguments, why in (
        ((), "nothing to count: name a --text file or folder, or --from-samples"),
        (("--text", tmp_path / "none.txt"), "none.txt': cannot be read"),
        (("--text", tmp_path, "--out", tmp_path / "no" / "file"), "there is no folder"),
        (("--text", tmp_path), "the corpus is empty"),
        (("--text", tmp_path, "--target", tmp_path), "the folder has none"),
    ):
        done = build(*arguments)
        assert done.exit_code == 2, done.output
        assert why in done.output
        assert "Traceback" not in done.output
    assert "build" in run("ngram", "--help").stdout


def test_a_file_for_another_tokenizer(build: Run, run: Run, stranger: Path, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    assert build("--text", tmp_path / "code.py").exit_code == 0
    option = f"file={tmp_path / 'file'}"
    done = run("generate", "x", "--target", stranger, "--method", "ngram", "-o", option)
    assert done.exit_code == 2
    assert "counts tokens of another vocabulary" in done.output
    assert len(done.output.splitlines()) == 1
