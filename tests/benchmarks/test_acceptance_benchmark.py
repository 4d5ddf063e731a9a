"""The benchmark of acceptance lengths: what it compares, the lengths, their intervals, the page."""

from pathlib import Path

import pytest
from tiny_bench import tiny_data, tiny_pair

from benchmarks.acceptance import BARS, TASKS, Row, arguments, bars, markdown, measure, plan_for
from benchmarks.acceptance import rows_of as rows
from outrider import Stats
from outrider.lab.bench import CellResult

TINY = ["--target", "target", "--draft", "draft", "--draft", "target", "--dtype", "float32"]
TINY += ["--method", "speculative:gamma=2", "--data", "one", "two", "--device", "cpu"]
TINY += ["--tokens", "6", "--batch", "2", "--threads", "1"]


def test_methods_run_with_each_draft_and_without_plain_decoding() -> None:
    plan = plan_for(arguments([*TINY, "--method", "block:gamma=2"]))
    pairs = [(each.title, each.draft) for each in plan.all_methods]
    assert pairs == [
        ("speculative:gamma=2", "draft"),
        ("speculative:gamma=2", "target"),
        ("block:gamma=2", "draft"),
        ("block:gamma=2", "target"),
    ]
    default = plan_for(arguments([]))
    assert {str(each.source) for each in default.data} == {
        f"runs/smollm2/prompts/{task}.jsonl" for task in TASKS
    }
    assert set(BARS) == set(default.temperatures)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[CellResult]:
    options = arguments([*TINY, "--journal", str(tmp_path_factory.mktemp("journal"))])
    data = {name: tiny_data(3, name) for name in ("one", "two")}
    return measure(options, models=tiny_pair(), data=data)


def test_a_target_that_drafts_for_itself_is_accepted_throughout(
    results: list[CellResult],
) -> None:
    found = {(row.temperature, row.draft): row.lengths() for row in rows(results)}
    assert len(found) == 4
    for temperature in (0.0, 1.0):
        itself = found[temperature, "target"]
        assert itself.keys() == {"one", "two", "mean"}
        assert itself["mean"].low == itself["mean"].value == itself["mean"].high == 3
        assert 1 <= found[temperature, "draft"]["mean"].value < 3


def test_batches_do_not_change_what_is_measured(results: list[CellResult], tmp_path: Path) -> None:
    options = arguments([*TINY, "--batch", "1", "--journal", str(tmp_path)])
    data = {name: tiny_data(3, name) for name in ("one", "two")}
    alone = measure(options, models=tiny_pair(), data=data)
    assert [row.lengths() for row in rows(alone)] == [row.lengths() for row in rows(results)]


def row(temperature: float, *outputs: list[Stats]) -> Row:
    """A row whose tasks have these counts."""
    tasks = {str(number): each for number, each in enumerate(outputs)}
    return Row("m", "d", temperature, tasks, "")


def test_tasks_count_alike_and_prompts_vary_within_them() -> None:
    short = [Stats(rounds=10, emitted=10), Stats(rounds=10, emitted=10)]
    long = [Stats(rounds=100, emitted=200), Stats(rounds=100, emitted=400)]
    lengths = row(0.0, short, long).lengths()
    assert (lengths["0"].value, lengths["1"].value, lengths["mean"].value) == (1, 3, 2)
    assert (lengths["0"].low, lengths["0"].high) == (1, 1)
    assert (lengths["1"].low, lengths["1"].high) == (2, 4)
    assert (lengths["mean"].low, lengths["mean"].high) == (1.5, 2.5)


def test_bars_and_the_page(results: list[CellResult]) -> None:
    least = BARS[0.0]
    good, bad = [Stats(rounds=10, emitted=round(10 * least))], [Stats(rounds=10, emitted=10)]
    assert [met for _, _, met in bars([row(0.0, good), row(1.0, bad), row(0.5, bad)])] == [
        True,
        False,
    ]
    text = markdown(results)
    assert "## Temperature 1" in text
    assert "| speculative:gamma=2 | target | 3.00 (3.00–3.00) | 3.00 (3.00–3.00) |" in text
    assert "Prompts: one: 3, two: 3." in text
