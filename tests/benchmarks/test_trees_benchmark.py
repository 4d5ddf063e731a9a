"""The benchmark of trees: drafts of equal size, the planned tree, bars and the page."""

from typing import Any

import pytest
from toy_trees import expected_tokens

from benchmarks.trees import NODES, Configuration, bars, configurations, k_ary, markdown, planned
from outrider.methods import METHODS

SHARES = [0.6, 0.1, 0.05, 0.02]
BIG = [
    each for each in configurations(planned(SHARES, NODES), planned(SHARES, NODES)) if each.options
]


@pytest.mark.parametrize("each", BIG, ids=lambda each: each.name)
def test_drafts_have_equally_many_nodes(each: Configuration) -> None:
    options: dict[str, Any] = dict(each.options)
    METHODS[each.method].recipe(options)
    found = options.get("num_nodes", NODES + 1) - 1
    assert len(options["topology"].paths if "topology" in options else range(found)) == NODES


def test_the_planned_tree_has_the_most_expected_tokens() -> None:
    most = expected_tokens(planned(SHARES, NODES).paths, SHARES)
    assert all(most >= expected_tokens(k_ary(k, NODES).paths, SHARES) for k in (1, 2, 3, 4, NODES))


def report(length: dict[str, float]) -> dict[str, Any]:
    """A report with equal results except for the given lengths."""
    ms = {"draft": 1.0, "target": 2.0, "other": 0.3}
    tree = planned(SHARES, NODES)
    rows = [
        {"name": c.name, "nodes": 16.0, "tokens_per_round": length.get(c.name, 2.0), "error": 0.1}
        | {"other_share": 0.1, "milliseconds": ms}
        for c in configurations(tree, tree)
    ]
    keys = ("date", "hardware", "threads", "dtype", "torch", "texts", "tokens", "command")
    return {
        "about": dict.fromkeys(keys, "x"),
        "temperatures": {"1.0": {"ranks": [("iid", SHARES)], "rows": rows}},
        "passes": {"float32": {"tree": 0.012, "chain": 0.010}},
    }


def test_bars_and_the_page() -> None:
    assert all(met for _, _, met in bars(report({})))
    worse = report({"3-ary tree": 2.1})
    assert [met for _, _, met in bars(worse)] == [True, True, True, True, True, False, True, True]
    page = markdown(worse)
    assert "as many tokens as 3-ary tree | 2.00 and 2.10 | no |" in page
    assert "| float32 | 12.0 | 10.0 |" in page
