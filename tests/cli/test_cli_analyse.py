"""``outrider analyse`` and ``outrider report``: values, cells, figures, errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from outrider.lab.analysis.speedup import optimal_gamma, speedup

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
import bench_cells

Run = Callable[..., Result]


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    """A cells.jsonl with a baseline and two methods."""
    file = tmp_path / "cells.jsonl"
    write(file, bench_cells.few())
    return file


def write(file: Path, values: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in values), encoding="utf-8")


def test_values(run: Run) -> None:
    result = run("analyse", "--alpha", 0.8, "--cost", 0.1, "--gamma", 4)
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["expected tokens per round"].split()[0] == "3.362"
    assert lines["speed-up"].strip() == f"{speedup(0.8, 4, 0.1):.4g}×"
    assert lines["optimal γ, if β is always 1"].split(",")[0].strip() == "6"
    assert result.stderr == ""


def test_values_as_json(run: Run) -> None:
    given = ("--alpha", 0.7, "--cost", 0.05, "--gamma", 5, "--beta", 1.3, "--operations", 0.1)
    found = json.loads(run("analyse", *given, "--json").stdout)["values"]
    assert found["speedup"] == pytest.approx(speedup(0.7, 5, 0.05, 1.3))
    assert found["optimal_gamma"] == optimal_gamma(0.7, 0.05, lambda tokens: 1.3)
    assert found["operations_factor"] > 1
    assert found["rounds"] < 128


def test_alpha_from_what_was_measured(run: Run) -> None:
    rate = run("analyse", "--acceptance-rate", 0.5904, "--gamma", 4, "--json")
    length = run("analyse", "--acceptance-length", 3.3616, "--gamma", 4, "--json")
    for result in (rate, length):
        assert json.loads(result.stdout)["values"]["alpha"] == pytest.approx(0.8)


def test_without_gamma_only_the_best_one(run: Run) -> None:
    result = run("analyse", "--alpha", 0.5, "--cost", 0.6)
    assert result.stdout.split("  ")[0] == "optimal γ, if β is always 1"
    assert "drafts do not pay" in result.stdout
    assert "unbounded" in run("analyse", "--alpha", 0.5).stdout


def test_cells_against_their_prediction(run: Run, cells: Path) -> None:
    result = run("analyse", "--cells", cells, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    tables = [line for line in result.stdout.splitlines() if "most is lost to" not in line]
    assert max(map(len, tables)) <= 80
    assert "code, temperature 1, batch size 1" in result.stdout
    assert "speculative, γ 4: most is lost to α, a factor of" in result.stdout
    assert "(lossy): most is lost" in result.stdout
    found = json.loads(run("analyse", "--cells", cells, "--json").stdout)["cells"]
    for each in found:
        product = each["reference"]["speedup"] * each["prefill"]
        for ratio in each["ratios"].values():
            product *= ratio
        assert product == pytest.approx(each["speedup"])
    assert found[0]["largest"] == "alpha"


def test_cells_against_a_reference(run: Run, cells: Path) -> None:
    given = ("--reference", "alpha=0.75,gamma=4,c=0.01,beta=1.2")
    found = json.loads(run("analyse", "--cells", cells, *given, "--json").stdout)["cells"]
    assert found[0]["reference"]["c"] == 0.01
    assert found[0]["largest"] == "c"


@pytest.mark.parametrize("name", ["leviathan-2", "leviathan-3", "prediction"])
def test_figures(run: Run, cells: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figure.svg"
    given = ("--cells", cells) if name == "prediction" else ()
    result = run("analyse", "--figure", name, "-o", file, *given)
    assert result.exit_code == 0, result.output
    assert result.stderr.strip() == f"wrote {file}"
    assert file.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to analyse"),
        (["--alpha", 0.5, "--acceptance-rate", 0.4], "all determine α: pass one of them"),
        (["--acceptance-rate", 0.4], "--gamma N is needed"),
        (["--alpha", 1.5], "--alpha 1.5: must be a probability"),
        (["--alpha", 0.5, "--gamma", 4, "--beta", 0], "must be above 0"),
        (["--acceptance-length", 9, "--gamma", 4], "must be from 1 to gamma + 1"),
        (["--alpha", 0.5, "--reference", "alpha=1"], "pass both"),
        (["--figure", "leviathan-2"], "belong together"),
        (["--figure", "leviathan-9", "-o", "x.svg"], "must be one of leviathan-2"),
        (["--figure", "leviathan-2", "-o", "x.pdf"], "must end in .svg or .png"),
        (["--figure", "leviathan-2", "-o", "nowhere/x.svg"], "there is no folder nowhere"),
        (["--figure", "prediction", "-o", "x.svg"], "pass --cells FILE"),
        (["--cells", "nowhere"], "no results in 'nowhere'"),
    ],
)
def test_bad_input(run: Run, arguments: list[object], message: str) -> None:
    result = run("analyse", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("alpha=x,gamma=4", "must be NAME=NUMBER"),
        ("alpha=0.5", "must name alpha and gamma"),
        ("alpha=0.5,gamma=4,speed=2", "must name alpha and gamma"),
        ("alpha=2,gamma=4", "must be a probability"),
    ],
)
def test_a_bad_reference(run: Run, cells: Path, reference: str, message: str) -> None:
    result = run("analyse", "--cells", cells, "--reference", reference)
    assert result.exit_code == 2
    assert message in result.stderr


def test_cells_without_a_baseline_explain_nothing(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    write(file, bench_cells.few()[1:])
    result = run("analyse", "--cells", file)
    assert result.exit_code == 2
    assert "no cell has both drafts and a measured baseline" in result.stderr


def test_report(run: Run, cells: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, charts = tmp_path / "page.html", tmp_path / "charts"
    result = run("report", cells, "-o", page, "--charts", charts, "--title", "Mine")
    assert result.exit_code == 0, result.output
    assert result.stderr.strip() == f"wrote {page} and charts in {charts}"
    assert "<h1>Mine</h1>" in page.read_text(encoding="utf-8")
    assert (charts / "speed.png").is_file()


def test_a_report_in_markdown(run: Run, cells: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.md"
    assert run("report", cells, "-o", page, "--title", "Mine").exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Mine\n")
    assert "## Environment" in text


def test_a_report_without_its_environment_is_an_error(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, page = tmp_path / "cells.jsonl", tmp_path / "page.html"
    write(file, [bench_cells.plain() | {"environment": {}}])
    result = run("report", file, "-o", page)
    assert result.exit_code == 2
    assert "its environment lacks hardware" in result.stderr
    assert not page.exists()


def test_a_line_that_is_no_cell_is_named(run: Run, cells: Path, tmp_path: Path) -> None:
    cells.write_text(cells.read_text(encoding="utf-8") + "{}\n", encoding="utf-8")
    result = run("report", cells, "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "line 4" in result.stderr


@pytest.mark.parametrize("output", ["nowhere/page.html", "."])
def test_a_page_that_cannot_be_written_is_an_error(run: Run, cells: Path, output: str) -> None:
    result = run("report", cells, "-o", output)
    assert result.exit_code == 2
    assert "--output" in result.stderr
