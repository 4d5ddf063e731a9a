"""The parts that all results pages share."""

import json
from pathlib import Path

import torch

from benchmarks import page
from outrider.lab.metadata import run_metadata


def test_a_page_says_where_it_was_measured_and_how_to_repeat_it() -> None:
    about = page.about("python -m benchmarks.some --repeats 3", repeats=3)
    assert (about["threads"], about["repeats"]) == (torch.get_num_threads(), 3)
    lines = page.header("Some title", about | {"threads": 1}, "γ 5.")
    assert lines[0] == "# Some title"
    assert "1 thread, " in lines[2]
    assert lines[2].endswith("; γ 5.")
    assert lines[-1] == "Command: `python -m benchmarks.some --repeats 3`"
    assert page.header("Part", about, level=2)[0] == "## Part"
    assert page.header("Part", run_metadata(command="c"))[2] == page.header("Part", about)[2]


def test_a_table_has_a_cell_per_column() -> None:
    assert page.table(("name", "ms", "×"), [("a", "1.0", "2"), ("b", 3, "")]) == [
        "",
        "| name | ms | × |",
        "|---|---:|---:|",
        "| a | 1.0 | 2 |",
        "| b | 3 |  |",
    ]
    assert page.table(("B",), [(1,)], left=0)[2] == "|---:|"
    assert page.bars_table([("fast", "0.5", False)])[-1] == "| fast | 0.5 | no |"


def test_a_report_is_written_as_json_and_as_a_page(tmp_path: Path) -> None:
    page.publish(tmp_path / "new", "some", {"α": 1}, "text\n")
    assert json.loads((tmp_path / "new/some.json").read_text(encoding="utf-8")) == {"α": 1}
    assert (tmp_path / "new/some.md").read_text(encoding="utf-8") == "text\n"


def test_the_command_line_has_the_options_of_every_benchmark() -> None:
    options = page.parser("A title.\n\nMore.").parse_args(["--out", "x", "--threads", "1"])
    assert (options.out, options.threads) == (Path("x"), 1)
    assert not hasattr(page.parser(None, threads=None).parse_args([]), "threads")
