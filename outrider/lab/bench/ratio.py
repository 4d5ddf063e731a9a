"""The ratio of two cells' speeds, with a bootstrap interval.

Both cells ran the same batches in the same repeats, alternately, so batch g of repeat r of one is
paired with batch g of repeat r of the other: what slows down the machine for a while slows down
both. After an interruption, or with another plan, one of the two may be from an earlier session, in
which the machine may have been slower: such repeats are paired only where there are no others, and
their ratio is not steady; nor is that of a single pair of the same session beside others.

The interval is that of a two-way bootstrap: repeats and batches are drawn with replacement, each
for both cells together (Owen, "The pigeonhole bootstrap", Annals of Applied Statistics 2007, which
is conservative). A batch is one prompt at batch size 1.

    total        tokens over seconds of all batches, over the same of the baseline
    per prompt   mean over batches of tokens per second, over the same of the baseline, as in
                 Spec-Bench (Xia et al., Findings of ACL 2024)

Legend: R repeats, G batches, S draws.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.lab.bench.record import Repeat

Array = NDArray[np.float64]

DRAWS = 2000
CONFIDENCE = 0.95
STEADY = 0.05
"""Speed-ups of two runs that may differ by more than this are not steady."""


def speedup(
    repeats: Sequence[Repeat],
    baseline: Sequence[Repeat],
    *,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[str, Any] | None:
    """The ratio of tokens per second to the baseline's, as JSON.

    Args:
        repeats: of the cell.
        baseline: of the other cell, over the same data set with the same batch size.
        draws: S, number of bootstrap draws.
        confidence: of the intervals.
        seed: of the draws.

    Returns:
        ``ratio``, ``low`` and ``high`` (total), ``per_prompt`` with the same three, ``repeats``
        (the ratio in each repeat), ``halves`` (the ratio in the even and in the odd repeats),
        ``distance`` and ``steady`` (how far another run may be, and whether that is within 5 %),
        and ``confidence``. None if no repeat is
        common to both cells.
    """
    mine, theirs, enough = _paired(repeats, baseline)
    if not mine:
        return None
    tokens_RG, seconds_RG = _arrays(mine)
    base_tokens_RG, base_seconds_RG = _arrays(theirs)
    draw = _Draws(tokens_RG.shape, draws, seed)

    def interval(values_S: Array) -> dict[str, float]:
        edge = (1 - confidence) / 2
        low, high = np.quantile(values_S, [edge, 1 - edge])
        return {"low": float(low), "high": float(high)}

    def total(sums: Any) -> Any:
        mine = sums(tokens_RG) / sums(seconds_RG)
        return mine / (sums(base_tokens_RG) / sums(base_seconds_RG))

    def per_prompt(sums: Any) -> Any:
        return sums(tokens_RG / seconds_RG) / sums(base_tokens_RG / base_seconds_RG)

    each = [
        one.tokens_per_second / other.tokens_per_second
        for one, other in zip(mine, theirs, strict=True)
    ]
    halves = [_total(mine[half::2], theirs[half::2]) for half in range(min(2, len(mine)))]
    return {
        "ratio": float(total(np.sum)),
        **interval(total(draw.sums)),
        "per_prompt": {
            "ratio": float(per_prompt(np.sum)),
            **interval(per_prompt(draw.sums)),
        },
        "repeats": each,
        "halves": halves,
        "distance": distance(each),
        "steady": enough and is_steady(halves, each),
        "confidence": confidence,
    }


def is_steady(halves: Sequence[float], ratios: Sequence[float]) -> bool:
    """Whether another run with as many repeats would give a ratio within 5 % of this one's, as far
    as the repeats tell: the even and the odd ones agree within 5 %, and the spread of all of them
    leaves no more. Without the second condition, a run that is repeated until it is steady ends
    where its halves agree by chance. Of one repeat alone nothing is known."""
    return max(halves) <= min(halves) * (1 + STEADY) and distance(ratios) <= STEADY


def distance(ratios: Sequence[float]) -> float:
    """How far apart two runs with as many repeats are at most, in 95 of 100 cases: the ratio of
    their geometric means less 1, if repeats vary as these do."""
    if len(ratios) < 2:
        return 0.0
    deviation = statistics.stdev(map(math.log, ratios))
    return math.expm1(1.96 * deviation * math.sqrt(2 / len(ratios)))


class _Draws:
    """Bootstrap draws of the repeats and batches of a table (R, G).

    Args:
        shape: R and G.
        draws: S.
        seed: of the draws.
    """

    def __init__(self, shape: tuple[int, ...], draws: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._repeats_SR, self._batches_SG = (
            generator.multinomial(size, np.full(size, 1 / size), draws).astype(float)
            for size in shape
        )

    def sums(self, values_RG: Array) -> Array:
        """The sum of a table in each draw, (S,)."""
        return ((self._repeats_SR @ values_RG) * self._batches_SG).sum(1)


def _paired(
    repeats: Sequence[Repeat], baseline: Sequence[Repeat]
) -> tuple[list[Repeat], list[Repeat], bool]:
    """The repeats that both have, by number: those of the same session, all of them if none is.
    And whether these are enough: if some were left out, there must be two."""
    others = {repeat.number: repeat for repeat in baseline}
    pairs = [(repeat, others[repeat.number]) for repeat in repeats if repeat.number in others]
    together = [(one, other) for one, other in pairs if one.session == other.session]
    kept = together or pairs
    enough = len(together) == len(pairs) or len(together) > 1
    return [one for one, _ in kept], [other for _, other in kept], enough


def _arrays(repeats: Sequence[Repeat]) -> tuple[Array, Array]:
    """Tokens and seconds of each batch, (R, G) each."""
    tokens = [[float(batch.tokens) for batch in repeat.batches] for repeat in repeats]
    seconds = [[batch.seconds for batch in repeat.batches] for repeat in repeats]
    return np.array(tokens), np.array(seconds)


def _total(repeats: Sequence[Repeat], baseline: Sequence[Repeat]) -> float:
    def speed(runs: Sequence[Repeat]) -> float:
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    return speed(repeats) / speed(baseline)
