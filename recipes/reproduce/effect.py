"""One claim of a paper with its size, interval and error probability.

Values are compared output by output: both methods continued the same prompt with the same seed. The
sign test counts the outputs on which one exceeds the other. Without an effect, either sign is
equally likely, so the probability that at least w of n differing outputs agree with the claim is

    Σ_{k ≥ w} C(n, k) / 2^n,

exactly, whatever the distribution of the values (Dixon and Mood, "The Statistical Sign Test", JASA
1946). Outputs are independent given the prompts: the error probability is over the sampling, and
says nothing about other prompts. A conclusion that needs several effects is wrong with at most the
largest of their error probabilities (Berger, "Multiparameter Hypothesis Testing", 1982).

Intervals are bootstrap percentile intervals of 95 % over the outputs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

Unit = tuple[int, int, int]
"""What names an output in every cell: repeat, example and turn."""
Values = Mapping[Unit, float]
"""A number of each output."""

ERROR = 0.05
"""Largest error probability at which an effect counts as shown."""
FALSE_ALARM = 0.001
"""Probability at which a claim of equality is rejected although it is true."""
RESAMPLES = 2000
_TAILS = (0.025, 0.975)


@dataclass(frozen=True)
class Effect:
    """A claim, and what was measured of it.

    Attributes:
        claim: in words.
        size: the estimate, in words such as ``ratio 1.20``.
        interval: of the estimate, in words; empty for a value without noise.
        wins, losses: outputs that agree and disagree with the claim; 0 where no sign is counted.
        error: probability of a result at least this clear if there were no effect.
        reverse_error: the same of the opposite claim.
        expected: why the effect need not be shown on the small pair of the quick run; empty if it
            must be shown there.
    """

    claim: str
    size: str
    interval: str
    wins: int
    losses: int
    error: float
    reverse_error: float
    expected: str = ""

    @property
    def outcome(self) -> str:
        """``shown``, ``reversed`` or ``undecided``."""
        if self.error <= ERROR:
            return "shown"
        return "reversed" if self.reverse_error <= ERROR else "undecided"

    def as_dict(self) -> dict[str, Any]:
        """The effect as JSON."""
        return asdict(self) | {"outcome": self.outcome}


def sign_test(wins: int, losses: int) -> float:
    """Probability of at least this many wins among ``wins + losses`` fair coins."""
    num = wins + losses
    return sum(math.comb(num, k) for k in range(wins, num + 1)) / 2**num


def greater(claim: str, a: Values, b: Values, expected: str = "") -> Effect:
    """The claim that a exceeds b; its size is the ratio of the means."""
    first, second = paired(a, b)
    ratio = statistics.fmean(first) / statistics.fmean(second) if any(second) else math.inf
    low, high = interval(list(zip(first, second, strict=True)), _ratio)
    return _counted(
        claim,
        f"ratio {ratio:.3g}",
        f"{low:.3g} to {high:.3g}",
        [x - y for x, y in zip(first, second, strict=True)],
        expected,
    )


def rising(claim: str, by_x: Mapping[float, Values], expected: str = "") -> Effect:
    """The claim that values grow with x; its size is the mean of the outputs' slopes."""
    slopes = _slopes(by_x)
    low, high = interval(slopes, statistics.fmean)
    size = f"slope {statistics.fmean(slopes):.3g}"
    return _counted(claim, size, f"{low:.3g} to {high:.3g}", slopes, expected)


def falling(claim: str, by_x: Mapping[float, Values], expected: str = "") -> Effect:
    """The claim that values fall with x; its size is the mean of the outputs' slopes."""
    slopes = _slopes(by_x)
    low, high = interval(slopes, statistics.fmean)
    size = f"slope {statistics.fmean(slopes):.3g}"
    return _counted(claim, size, f"{low:.3g} to {high:.3g}", [-each for each in slopes], expected)


def falling_mean(claim: str, by_x: Mapping[float, Values], expected: str = "") -> Effect:
    """The claim that the mean falls with x, by the bootstrap; its size is the mean slope."""
    slopes = _slopes(by_x)
    low, high = interval(slopes, statistics.fmean)
    found = positive(claim, [-each for each in slopes], statistics.fmean, expected=expected)
    size = f"slope {statistics.fmean(slopes):.3g}"
    return replace(found, size=size, interval=f"{low:.3g} to {high:.3g}")


def positive(
    claim: str,
    items: Sequence[Any],
    statistic: Callable[[Sequence[Any]], float],
    size: str = "{:.3g}",
    expected: str = "",
) -> Effect:
    """The claim that a statistic of all outputs is above 0. Its error probability is the share of
    bootstrap resamples in which it is not.

    Args:
        claim: in words.
        items: one per output.
        statistic: of a resample of them.
        size: how the estimate is written.
        expected: as :class:`Effect`.
    """
    drawn = _resampled(items, statistic)
    low, high = np.quantile(drawn, _TAILS, method="inverted_cdf")
    return Effect(
        claim,
        size.format(statistic(items)),
        f"{low:.3g} to {high:.3g}",
        0,
        0,
        float((1 + np.sum(drawn <= 0)) / (1 + len(drawn))),
        float((1 + np.sum(drawn >= 0)) / (1 + len(drawn))),
        expected,
    )


def exceeds(claim: str, a: Values, b: Values, expected: str = "") -> Effect:
    """The claim that a exceeds b on other prompts, by a permutation test of the difference of the
    prompts' means: the outputs of a prompt are not independent of each other.
    """
    first, second = by_prompt(a), by_prompt(b)
    observed = statistics.fmean(first) - statistics.fmean(second)
    generator = np.random.Generator(np.random.PCG64(0))
    pooled = np.array([*first, *second])
    drawn = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        order = generator.permutation(pooled)
        drawn[number] = order[: len(first)].mean() - order[len(first) :].mean()
    rounding = 1e-12
    return Effect(
        claim,
        f"{statistics.fmean(first):.3g} and {statistics.fmean(second):.3g}",
        "permutations of prompts",
        0,
        0,
        float((1 + np.sum(drawn >= observed - rounding)) / (1 + RESAMPLES)),
        float((1 + np.sum(drawn <= observed + rounding)) / (1 + RESAMPLES)),
        expected,
    )


def same(claim: str, a: Values, b: Values, expected: str = "") -> Effect:
    """The claim that neither of a and b tends to exceed the other: shown unless the two-sided sign
    test rejects equality at ``FALSE_ALARM``. It cannot show that there is no difference at all."""
    first, second = paired(a, b)
    differences = [x - y for x, y in zip(first, second, strict=True)]
    low, high = interval(differences, statistics.fmean)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    two_sided = min(1.0, 2 * min(sign_test(wins, losses), sign_test(losses, wins)))
    rejected = two_sided <= FALSE_ALARM
    return Effect(
        claim,
        f"difference {statistics.fmean(differences):.3g}",
        f"{low:.3g} to {high:.3g}",
        wins,
        losses,
        1.0 if rejected else FALSE_ALARM,
        FALSE_ALARM if rejected else 1.0,
        expected,
    )


def greater_mean(claim: str, a: Values, b: Values, expected: str = "") -> Effect:
    """The claim that a's mean exceeds b's, by the bootstrap: for values of which a few decide, such
    as expectations of single drafts, where a may be smaller on most outputs and larger in all."""
    pairs = list(zip(*paired(a, b), strict=True))
    low, high = interval(pairs, _ratio)
    found = positive(claim, pairs, _mean_difference, expected=expected)
    return replace(found, size=f"ratio {_ratio(pairs):.3g}", interval=f"{low:.3g} to {high:.3g}")


def certain(claim: str, size: str, holds: bool, expected: str = "") -> Effect:
    """A claim about numbers without noise, such as those of a formula."""
    return Effect(claim, size, "", 0, 0, float(not holds), float(holds), expected)


def paired(a: Values, b: Values) -> tuple[list[float], list[float]]:
    """The values of the outputs that both have, in the same order."""
    shared = [unit for unit in a if unit in b]
    if not shared:
        raise ValueError("no output is in both cells: they differ in prompts or seeds")
    return [a[unit] for unit in shared], [b[unit] for unit in shared]


def over_repeats(values: Values) -> Values:
    """The mean of each prompt's outputs, as if all were of repeat 0. Pairs sampled outputs with
    greedy ones."""
    found: dict[Unit, list[float]] = defaultdict(list)
    for (_, example, turn), value in values.items():
        found[0, example, turn].append(value)
    return {unit: statistics.fmean(each) for unit, each in found.items()}


def by_prompt(values: Values) -> list[float]:
    """The mean of each prompt's outputs."""
    return list(over_repeats(values).values())


def mean(values: Values) -> float:
    """The mean over outputs; NaN if there are none."""
    return statistics.fmean(values.values()) if values else math.nan


def interval(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float]
) -> tuple[float, ...]:
    """The 95 % bootstrap percentile interval of a statistic."""
    return tuple(np.quantile(_resampled(items, statistic), _TAILS, method="inverted_cdf").tolist())


def _counted(
    claim: str, size: str, between: str, differences: Sequence[float], expected: str
) -> Effect:
    wins = sum(each > 0 for each in differences)
    losses = sum(each < 0 for each in differences)
    forward, backward = sign_test(wins, losses), sign_test(losses, wins)
    return Effect(claim, size, between, wins, losses, forward, backward, expected)


def _slopes(by_x: Mapping[float, Values]) -> list[float]:
    """The least-squares slope of each output that all x have."""
    xs = sorted(by_x)
    shared = [unit for unit in by_x[xs[0]] if all(unit in by_x[x] for x in xs)]
    if not shared:
        raise ValueError("no output is in all cells: they differ in prompts or seeds")
    return [float(np.polyfit(xs, [by_x[x][unit] for x in xs], 1)[0]) for unit in shared]


def _mean_difference(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(a - b for a, b in pairs)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below else math.inf


def _resampled(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    generator = np.random.Generator(np.random.PCG64(0))
    num = len(items)
    drawn = (generator.integers(num, size=num).tolist() for _ in range(RESAMPLES))
    return np.array([statistic([items[i] for i in each]) for each in drawn], dtype=np.float64)
