"""Predicted against measured speed-up of cells."""

from typing import Any

import bench_cells
import pytest
from bench_cells import DRAFT, PASS, PLAIN, cell, plain

from outrider.lab.analysis.prediction import Factors
from outrider.lab.cell_view import view
from outrider.lab.prediction import factors_of, predictions_of


def factors(drafting: dict[str, Any], baseline: dict[str, Any]) -> Factors:
    found = factors_of(view(drafting), view(baseline))
    assert found is not None
    return found


def test_the_factors_are_those_of_the_times_without_prefill() -> None:
    """The made-up times have 8 % of noise per round, which leaves 1 % in the means."""
    found = factors(cell("speculative", alpha=0.75, gamma=4, beta=1.2), plain())
    assert found.alpha == 0.75
    assert found.gamma == 4
    assert found.c == pytest.approx(DRAFT / PASS, rel=0.02)
    assert found.beta == pytest.approx(1.2, rel=0.02)
    rest = 1.5 * (PLAIN - PASS)
    overhead = (4 * DRAFT + 1.2 * PASS + rest) / PLAIN - (4 * DRAFT + 1.2 * PASS) / PASS
    assert found.overhead == pytest.approx(overhead, abs=0.02)
    assert found.dependence == pytest.approx(1, abs=0.1)


def test_a_batch_divides_the_prefill() -> None:
    """The engine divides all seconds of a batch equally among its rows."""
    drafting = cell("speculative", alpha=0.7, gamma=4, beta=1.2, batch_size=4)
    found = factors(drafting, plain(batch_size=4))
    assert found.beta == pytest.approx(1.2, rel=0.005)
    assert found.c == pytest.approx(DRAFT / PASS, rel=0.05)


def test_prefill_is_a_factor_of_its_own() -> None:
    views = [view(each) for each in bench_cells.few()]
    for each in predictions_of(views):
        assert each.factors.speedup * each.prefill == pytest.approx(each.measured)
        assert each.prefill < 1  # it takes the same time with and without drafts


def test_the_depth_of_a_tree_is_its_draft_length() -> None:
    tree = cell("sequoia", alpha=0.7, gamma=4)
    tree["speed"]["drafted"] *= 5  # nodes
    assert factors(tree, plain()).gamma == 4


def test_cells_are_compared_with_the_baseline_of_their_setting() -> None:
    cells = [
        plain(),
        plain(temperature=0.0),
        cell("speculative", alpha=0.7, gamma=4, temperature=0.0),
        cell("speculative", alpha=0.7, gamma=4, data="prose"),
    ]
    found = predictions_of([view(each) for each in cells])
    assert [each.cell.temperature for each in found] == [0.0]


@pytest.mark.parametrize(
    "change", [{"alpha": None}, {"rounds": 0}, {"first_token_seconds": {"mean": 9.0, "p50": None}}]
)
def test_cells_without_the_numbers_have_no_factors(change: dict[str, Any]) -> None:
    """No α, no rounds, or a prefill that takes longer than all passes."""
    drafting, baseline = cell("speculative", alpha=0.7, gamma=4), plain()
    for each in (drafting, baseline):
        each["speed"] |= change
    assert factors_of(view(drafting), view(baseline)) is None
    assert predictions_of([view(baseline), view(drafting)]) == []
