"""The tables of a report in Markdown: all cells, lossy methods marked, with the environment."""

from pathlib import Path

import bench_cells
import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.cell_view import CellFormatError, views_of
from outrider.lab.markdown import markdown_table
from outrider.lab.report.markdown import (
    NUMBERS,
    SPEED,
    number_of,
    setting_tables,
    write_markdown,
    written_speed,
)


def test_a_cell_cannot_end_its_row() -> None:
    assert markdown_table(("a|b", "c"), [("x\ny", 1)]) == [
        "| a\\|b | c |",
        "|---|---:|",
        "| x y | 1 |",
    ]
    assert markdown_table(("B",), [(1,)], left=0)[1] == "|---:|"


def test_methods_stand_below_each_other_and_data_sets_side_by_side() -> None:
    cells = [
        {**each, "cell": {**each["cell"], "data": data}}
        for data in ("a", "b")
        for each in (bench_cells.cell("plain"), bench_cells.cell("fast", alpha=0.7, gamma=4))
    ]
    cells[1]["cell"]["lossless"] = False
    cells[3]["cell"]["lossless"] = False
    cells[3]["error"] = "out of memory"
    views = views_of(cells)
    lines = setting_tables(views, [SPEED])
    assert lines[1] == f"## Temperature {views[0].temperature:g}, batch {views[0].batch_size}"
    assert lines[3] == "|  | a | b |"
    speed = f"{views[0].tokens_per_second.value:.0f}/s"
    assert lines[5] == f"| plain | {speed} | {speed} |"
    assert lines[6].startswith("| fast, γ 4 (lossy) | ")
    assert written_speed(views[1]) in lines[6]
    assert lines[6].endswith("| failed: out of memory |")
    assert lines[8] == "Tokens per second:"
    assert lines[-1].endswith("| – |")  # a failed cell has no number


def test_numbers_are_those_of_the_cell() -> None:
    cell, plain = views_of(
        [bench_cells.cell("fast", alpha=0.7, gamma=4), bench_cells.cell("plain")]
    )
    found = {name: number_of(cell, name) for name in NUMBERS}
    assert found["α"] == pytest.approx(0.7)
    assert found["tokens per round"] == cell.acceptance_length
    assert found["accepted per round"] == pytest.approx(cell.acceptance_length - 1)
    assert number_of(plain, "α") is None
    assert number_of(cell, "no such metric") is None


def test_the_file_has_the_environment_or_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    cells = bench_cells.few()
    write_markdown(cells, file, "Title")
    text = file.read_text(encoding="utf-8")
    assert text.startswith("# Title\n")
    for name in ("hardware", "versions", "commit", "command", "date"):
        assert f"| {name} | " in text
    file.unlink()
    cells[0]["environment"] = {**cells[0]["environment"]}
    del cells[0]["environment"]["hardware"]
    with pytest.raises(CellFormatError, match="hardware"):
        write_markdown(cells, file)
    with pytest.raises(InvalidParameterError, match="at least one cell"):
        write_markdown([], file)
    assert not list(tmp_path.iterdir())
