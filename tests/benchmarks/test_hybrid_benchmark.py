"""The benchmark of hybrid drafts compares fusions with their best part."""

from typing import Any

from benchmarks.hybrid import DEFAULT, FUSIONS, KINDS, PARTS, bars, markdown
from outrider.methods import METHODS


def report(ratio: dict[str, float]) -> dict[str, Any]:
    """A report with equal results except for the given ratios."""
    keys = ("date", "hardware", "threads", "torch", "dtype", "texts", "tokens", "repeats", "note")
    row = {"tokens_per_second": 80.0, "smallest_ratio": 1.0, "largest_ratio": 2.0}
    rows = {
        name: row | {"acceptance_length": 2.0, "ratio": ratio.get(name, 1.5)}
        for name in (*PARTS, *FUSIONS)
    }
    return {
        "about": dict.fromkeys((*keys, "command"), "x"),
        "gains": {"0": dict.fromkeys(KINDS, rows)},
    }


def test_configurations_are_methods_with_valid_options() -> None:
    for method, _, options in (PARTS | FUSIONS).values():
        METHODS[method].recipe(options)


def test_bars_and_the_page() -> None:
    assert all(met for _, _, met in bars(report({})["gains"]))
    worse = report({"lookup": 1.6})
    assert not any(met for _, _, met in bars(worse["gains"]))
    page = markdown(worse)
    assert "0.98 of the best part | 0.94 | no |" in page
    assert "| order | 1.50× (1.00-2.00), 2.0, 0.94 |" in page
    assert DEFAULT in FUSIONS
