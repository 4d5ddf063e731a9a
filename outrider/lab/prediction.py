"""The factors of measured cells: predicted against measured speed-up of a benchmark.

A cell's seconds in forward passes include prefill, which the formula of the speed-up does not know.
Prefill is therefore taken out. A request's first round ends after prefill and one round, so

    prefill = mean time to the first token - mean time between rounds

Plain decoding's is that of the target; what a method's exceeds it by is that of its draft. In a
batch the engine divides all seconds equally among the rows, and so is prefill here. What prefill
does to the speed-up over whole outputs is reported as a factor of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.analysis.prediction import Factors, Shortfall, measured_factors, shortfall
from outrider.lab.cell_view import CellView


@dataclass(frozen=True)
class CellPrediction:
    """A cell's measured speed-up and what explains it.

    Attributes:
        cell: the cell.
        factors: of its rounds.
        measured: speed-up of whole outputs over plain decoding, prefill included.
    """

    cell: CellView
    factors: Factors
    measured: float

    @property
    def prefill(self) -> float:
        """What prefill multiplies the speed-up of rounds by; below 1 where it dilutes it."""
        return self.measured / self.factors.speedup

    def shortfall(self, reference: Factors | None = None) -> Shortfall:
        """How the factors explain the distance from a reference; None takes the ideal."""
        return shortfall(self.factors, reference)


def predictions_of(views: Sequence[CellView]) -> list[CellPrediction]:
    """The predictions of all drafting cells that have a baseline of the same setting.

    Cells without α, without rounds, or whose time prefill dominates are left out.
    """
    plain = {each.setting: each for each in views if each.is_baseline and each.measured}
    found = []
    for each in views:
        baseline = plain.get(each.setting)
        if baseline is None or each.is_baseline or not each.measured or each.speedup is None:
            continue
        factors = factors_of(each, baseline)
        if factors is not None:
            found.append(CellPrediction(each, factors, each.speedup.value))
    return found


def factors_of(cell: CellView, plain: CellView) -> Factors | None:
    """The factors of a cell, relative to plain decoding at the same setting.

    Drafted tokens per round are the mean over rounds; of a tree, its depth, so that the gain of its
    branches counts to the dependence between positions.

    Returns:
        None if the cell drafted nothing, or if nothing is left of a pass without prefill.
    """
    depth = len(cell.verified_at)
    if cell.alpha is None or not (cell.rounds and plain.rounds and depth):
        return None
    of_target = _prefill(plain)
    of_draft = max(0.0, _prefill(cell) - of_target)
    target = (cell.target_seconds - of_target * cell.requests) / cell.rounds
    plain_target = (plain.target_seconds - of_target * plain.requests) / plain.rounds
    if target <= 0 or plain_target <= 0:
        return None
    return measured_factors(
        alpha=min(cell.alpha, 1.0),
        gamma=min(cell.drafted / cell.rounds, depth),
        tokens=cell.acceptance_length,
        draft_seconds=max(0.0, (cell.draft_seconds - of_draft * cell.requests) / cell.rounds),
        target_seconds=target,
        other_seconds=cell.other_seconds / cell.rounds,
        plain_target_seconds=plain_target,
        plain_other_seconds=plain.other_seconds / plain.rounds,
    )


def _prefill(cell: CellView) -> float:
    """Seconds of a request's prefill; 0 where every output had a single round."""
    if cell.first_token_mean is None or cell.round_mean is None:
        return 0.0
    return max(0.0, cell.first_token_mean - cell.round_mean) / cell.batch_size
