"""``outrider frontier``: its tables, its files, its verdict, its errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import Result

import outrider.lab.frontier as bench
from outrider.core import Divergence
from outrider.lab.frontier import SETTINGS, Family
from outrider.lab.frontier.envelope import MentoredEnvelope
from outrider.verifiers import Lenience, Mentored, Rejection

Run = Callable[..., Result]

FEW = (
    Family("speculative", Rejection),
    Family("mentored kl", Mentored, "budget", (0.01, 0.1, 1.0), {"divergence": "kl"}),
    Family("lenience", Lenience, "lenience", (0.9, 0.3)),
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rules, for speed."""
    monkeypatch.setattr(bench, "FAMILIES", FEW)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("def f3(x):\n\n    return x + 4\n", encoding="utf-8")
    return file


@pytest.fixture
def frontier(pair: tuple[Path, Path], run: Run, prompts: Path, tmp_path: Path) -> Run:
    """The command with the tiny pair, two prompts, and small numbers of everything."""

    def call(*arguments: object, file: Path | None = prompts) -> Result:
        target, draft = pair
        models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
        size = ("--positions", 6, "--max-new-tokens", 4, "--repeats", 2, "--texts", 1)
        where = ("--out", tmp_path / "out")
        given = () if file is None else ("-f", file)
        return run("frontier", *models, *size, *where, *given, *arguments)

    return call


def document(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "out" / "frontier.json").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("few")
def test_tables_files_and_verdict(frontier: Run, tmp_path: Path) -> None:
    result = frontier()
    assert result.exit_code == 0, result.output
    assert "upper envelope" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    for setting in SETTINGS:
        assert setting.name in result.stdout
    assert result.stderr.startswith("wrote ")
    assert str(tmp_path / "out") in result.stderr
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "frontier.json",
        "frontier.svg",
        "frontier.png",
    }
    found = document(tmp_path)
    assert found["about"]["positions"] == 6
    assert found["about"]["seed"] == 0
    assert found["about"]["prompts"] == 2
    assert set(found["about"]["versions"]) == {"outrider", "torch", "transformers", "python"}
    assert [line["name"] for line in found["plane"]["lines"]] == [family.name for family in FEW]
    assert found["plane"]["envelope"]["holds"] is True
    assert [row["name"] for row in found["generations"]] == [s.name for s in SETTINGS]
    check_generations(found)


def check_generations(found: Any) -> None:
    rows = {row["name"]: row for row in found["generations"]}
    plain = rows["plain"]
    assert plain["speedup"]["repeats"] == [1.0, 1.0]
    assert plain["stats"]["acceptance_length"] == 1
    for row in rows.values():
        assert row["perplexity"]["texts"] == 2 * 1 + 2 * 2
        assert row["perplexity"]["macro"] > 1
        assert len(row["tokens_per_second"]["repeats"]) == 2
        kl = float(row["stats"]["kl_per_token"])
        assert (kl == 0) if row["lossless"] else (kl > 0)
    for budget in (0.05, 0.2, 0.8):
        assert rows[f"mentored {budget}"]["stats"]["kl_per_token"] <= budget


@pytest.mark.usefixtures("few")
def test_the_plane_alone_as_json(frontier: Run, tmp_path: Path) -> None:
    result = frontier("--no-generations", "--json", "--top-p", "0.9")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == document(tmp_path)
    assert json.loads(result.stdout)["generations"] == []
    assert result.stderr == ""


@pytest.mark.usefixtures("few")
def test_a_best_rule_that_wastes_budget_ends_with_code_1(
    frontier: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = MentoredEnvelope.__call__

    def wasteful(
        self: MentoredEnvelope, divergence: Divergence, budget_K: Tensor, off: bool
    ) -> Tensor:
        return best(self, divergence, 0.9 * budget_K, off)

    monkeypatch.setattr(MentoredEnvelope, "__call__", wasteful)
    result = frontier("--no-generations")
    assert result.exit_code == 1
    assert "NOT the upper envelope" in result.stdout
    assert "more at a position" in result.stdout


@pytest.mark.usefixtures("few")
def test_the_embedded_pair_has_prompts(run: Run, tmp_path: Path) -> None:
    result = run("frontier", "--positions", 4, "--no-generations", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "target embedded, draft embedded" in result.stdout
    assert document(tmp_path)["about"]["prompts"] > 1


def test_json_lines(frontier: Run, tmp_path: Path, few: None) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "def f1(x):\\n"}\n{"prompt": "return"}\n', encoding="utf-8")
    assert frontier("--no-generations", file=file).exit_code == 0
    assert document(tmp_path)["about"]["prompts"] == 2


# ------------------------------------------------------------------------------------- errors


def assert_refused(result: Result, *parts: str) -> None:
    lines = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--temperature", "0"], ["--temperature", "above 0"]),
        (["--top-p", "0"], ["--top-p 0.0"]),
        (["--positions", "0"], ["--positions"]),
        (["--max-new-tokens", "1000"], ["the context of 256", "--max-new-tokens"]),
        (["--num-speculative-tokens", "65"], ["--num-speculative-tokens 65"]),
        (["-f", "nowhere.txt"], ["'nowhere.txt'"]),
    ],
)
def test_bad_options(frontier: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(frontier(*arguments), *parts)


def test_no_draft_or_no_prompts(pair: tuple[Path, Path], run: Run, prompts: Path) -> None:
    target, draft = pair
    assert_refused(run("frontier", "-f", prompts, "--target", target), "--draft MODEL")
    assert_refused(run("frontier", "--target", target, "--draft", draft), "-f FILE")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_prompt_file(frontier: Run, tmp_path: Path, content: str) -> None:
    file = tmp_path / "empty.txt"
    file.write_text(content)
    assert_refused(frontier(file=file), "prompt")


def test_prompts_that_are_too_long(frontier: Run, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("def f(x): return x + 1; " * 200)
    assert_refused(frontier(file=file), "256", "shorten")


def test_a_folder_that_cannot_be_written(frontier: Run, prompts: Path) -> None:
    assert_refused(frontier("--out", prompts / "in" / "a" / "file"), "--out", "cannot write")


def test_an_interrupted_run_leaves_no_folder(
    frontier: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "paired_distributions", interrupt)
    result = frontier("--out", tmp_path / "new" / "out")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert not (tmp_path / "new").exists()
    (tmp_path / "out").mkdir()
    assert frontier().exit_code == 130
    assert (tmp_path / "out").exists()  # it existed before


def test_without_matplotlib_nothing_is_done(
    frontier: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(frontier(), 'pip install "outrider[bench]"')
    assert not (tmp_path / "out").exists()
