"""The project's plans are valid, and their pages have all results and bars."""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_bench import repeat

from benchmarks.run_plan import (
    PLANS,
    arguments,
    bars,
    page,
    planned,
    slim,
)
from outrider.lab.bench import Cell, CellResult, speedup
from outrider.lab.bench.speed import speed_of
from outrider.lab.cell_view import views_of
from outrider.lab.data import Example
from outrider.lab.report.markdown import NUMBERS, SPEED

NAMES = sorted(path.stem for path in PLANS.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_valid_and_their_bars_name_methods(name: str) -> None:
    plan, description = planned(name, arguments([name]))
    titles = {method.title for method in plan.all_methods}
    assert len(titles) == len(plan.methods) + 1
    assert description["page"]["title"]
    for bar in description.get("bars", ()):
        assert {bar["method"], *bar["best_of"]} <= titles
        assert ("at_least" in bar) != ("at_most" in bar)
        assert bar.get("at_least", bar.get("at_most")) > 0
        metric = bar.get("number", SPEED).rpartition(" ")[0]
        assert bar.get("number", SPEED) in NUMBERS or metric in plan.metrics
        assert set(bar.get("data", [])) <= {
            Path(spec.source.split(":")[-1]).stem for spec in plan.data
        }


def test_the_command_line_replaces_values() -> None:
    plan, _ = planned("hybrid", arguments(["hybrid", "--repeats", "2", "--limit", "1"]))
    assert plan.repeats == 2
    assert {spec.limit for spec in plan.data} == {1}
    assert plan.max_new_tokens == 64
    plan, _ = planned("joint", arguments(["joint", "--limit", "1"]))
    assert {spec.limit for spec in plan.data} == {1}
    with pytest.raises(SystemExit):
        arguments(["none"])


def result(title: str, data: str, tokens: int, *, lossless: bool = True) -> CellResult:
    """A cell whose two repeats have so many tokens in a second."""
    repeats = tuple(repeat(number, (1.0, tokens)) for number in range(2))
    plain = [repeat(number, (1.0, 10)) for number in range(2)]
    cell = Cell(title, title, None, None, 0.0, data, 1, lossless, title == "plain", {})
    names = ("date", "hardware", "threads", "commit", "dtype")
    plan = {"target": "embedded", "compile": "off", "max_new_tokens": 64, "repeats": 2}
    about: dict[str, Any] = dict.fromkeys(names, "x")
    about |= {"plan": plan, "versions": {"torch": "x"}}
    ratio = None if title == "plain" else speedup(repeats, plain)
    speed = speed_of(repeats, [Example("x")], None)
    return CellResult(cell, {"name": data, "examples": 3}, repeats, speed, ratio, {}, [], "", about)


def results() -> list[CellResult]:
    return [
        result(title, data, tokens, lossless=title != "fast")
        for data, factor in (("a", 1), ("b", 2))
        for title, tokens in (("plain", 10), ("copy", 15 * factor), ("fast", 25))
    ]


def test_bars_compare_with_the_best_of_the_others() -> None:
    bar = {"method": "copy", "best_of": ["plain", "fast"], "at_least": 0.9}
    cells = views_of(results())
    found = bars([bar], cells)
    assert [(round(share, 3), met) for _, share, met in found] == [(0.6, False), (1.2, True)]
    assert len(bars([bar | {"data": ["b"]}], cells)) == 1


def test_bars_of_other_numbers_and_of_cells_that_lack_them() -> None:
    low, high = (
        replace(result(title, "a", 10), metrics={"perplexity": {"macro": value}})
        for title, value in (("copy", 2.0), ("plain", 4.0))
    )

    def bar_of(values: dict[str, Any], *cells: CellResult) -> tuple[str, float, bool]:
        (found,) = bars([{"method": "copy", "best_of": ["plain"], **values}], views_of(cells))
        return found

    perplexity = {"number": "perplexity macro", "at_most": 0.9}
    text, share, met = bar_of(perplexity, low, high)
    assert (share, met) == (0.5, True)
    assert text == "copy, temperature 0, a, batch 1, perplexity macro: at most 0.9 of plain"
    assert bar_of(perplexity, replace(low, metrics={}), high)[1:] == (math.inf, False)
    failed = replace(low, error="failed")
    assert not bar_of({"number": SPEED, "at_most": 1}, failed, high)[2]
    assert bar_of({"at_least": 0.5}, failed, high)[1:] == (0.0, False)


def test_the_page_and_the_document(tmp_path: Path) -> None:
    bar = {"method": "copy", "best_of": ["plain"], "at_least": 1.8}
    description = {"page": {"title": "T", "text": "Words."}, "command": "x", "bars": [bar]}
    text = page(description, results())
    assert text.startswith("# T\n")
    assert "Prompts: a: 3, b: 3." in text
    assert "| copy, temperature 0, a, batch 1: 1.8 of plain | 1.50 | no |" in text
    assert set(slim(results()[0])) >= {"cell", "data", "speed", "speedup"}
    assert isinstance(arguments(["hybrid"]), argparse.Namespace)
