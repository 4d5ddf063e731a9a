"""End to end: continuations by the method against continuations by plain decoding.

Chi-square tests of homogeneity. With n texts from either side, a_c and b_c of them in cell c,

    X² = Σ_c (a_c - b_c)² / (a_c + b_c)

is chi-square with C-1 degrees of freedom if the distributions P and Q of the two are one, and in
general noncentral with

    λ = n Σ_c (P_c - Q_c)² / (P_c + Q_c)  >=  n (Σ_c |P_c - Q_c|)² / Σ_c (P_c + Q_c)  =  2 n δ²

(Cauchy-Schwarz), where δ is the total variation between the cells. Statistics of m prompts add up,
and by convexity so do the bounds: λ >= 2 n m δ², now with δ the mean over prompts. Hence the δ that
would have been found with a given probability.

Cells are formed by the counts of both sides together, which says nothing about which side a text is
from, so the choice does not disturb the test.

Legend: B texts, L tokens, C cells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.lab.certify.report import FALSE_ALARM, POWER, STATISTICAL_CHECKS, Check

NAME = "texts"
_LEAST = 20  # texts of a cell, both sides together
_CELLS = 24  # cells with a smaller share than one of so many are pooled


@dataclass(frozen=True)
class Homogeneity:
    """A statistic with its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        return chi2_tail(self.statistic, self.degrees) if self.degrees else 1.0


def check(ours: Sequence[Tensor], plains: Sequence[Tensor], verified: bool) -> Check:
    """The test over all prompts, and the deviation that it would have found."""
    L = ours[0].shape[1]
    tests: list[Homogeneity] = []
    for last in range(1, L + 1):
        spans = [slice(0, last)] if last == 1 else [slice(0, last), slice(last - 1, last)]
        for span in spans:
            parts = [homogeneity(a[:, span], b[:, span]) for a, b in zip(ours, plains, strict=True)]
            tests.append(
                Homogeneity(sum(p.statistic for p in parts), sum(p.degrees for p in parts))
            )
    tests = [test for test in tests if test.degrees]
    if not tests:
        return Check.skipped(NAME, "all texts are equal, or too few for cells")
    num = sum(len(a) for a in ours)
    threshold = FALSE_ALARM / STATISTICAL_CHECKS
    p_value = min(1.0, min(test.p_value for test in tests) * len(tests))
    found = max(findable(num, test.degrees, threshold / len(tests)) for test in tests)
    words = f"p-value, {num} texts of {L} tokens against plain ones, {len(tests)} tests"
    claim = "too few texts for a statement end to end"
    if found < 1:
        claim = f"end-to-end deviation > {found:.2g} would have been found with probability {POWER}"
    words += f"; fails below {threshold:.2g}"
    if not verified:
        return Check(NAME, None, p_value, words)
    return Check(NAME, p_value > threshold, p_value, words, claim)


def homogeneity(a_BL: Tensor, b_BL: Tensor) -> Homogeneity:
    """Of two samples of the same size."""
    _, cell_B = torch.cat([a_BL, b_BL]).unique(dim=0, return_inverse=True)
    num_cells = int(cell_B.max()) + 1
    a_C, b_C = (
        torch.bincount(part, minlength=num_cells).double() for part in cell_B.split(len(a_BL))
    )
    small_C = a_C + b_C < max(_LEAST, 2 * len(a_BL) / _CELLS)
    a_C = torch.cat([a_C[~small_C], a_C[small_C].sum()[None]])
    b_C = torch.cat([b_C[~small_C], b_C[small_C].sum()[None]])
    if 0 < float(a_C[-1] + b_C[-1]) < _LEAST and len(a_C) > 1:
        least = int((a_C + b_C)[:-1].argmin())  # the pool is small itself: let it join
        a_C[least] += a_C[-1]
        b_C[least] += b_C[-1]
        a_C, b_C = a_C[:-1], b_C[:-1]
    both_C = a_C + b_C
    terms_C = torch.where(both_C > 0, (a_C - b_C) ** 2 / both_C, 0.0)
    return Homogeneity(float(terms_C.sum()), int((both_C > 0).sum()) - 1)


def findable(num: int, degrees: int, false_alarm: float, power: float = POWER) -> float:
    """The total variation that a test with ``num`` texts on either side finds so often."""
    critical = _bisect(lambda x: chi2_tail(x, degrees) < false_alarm)
    noncentrality = _bisect(lambda size: ncx2_tail(critical, degrees, size) > power)
    return float((noncentrality / (2 * num)) ** 0.5)


def chi2_tail(x: float, degrees: float) -> float:
    """P(X² > x)."""
    halves = torch.tensor([degrees / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def ncx2_tail(x: float, degrees: float, noncentrality: float) -> float:
    """P(X² > x) of the noncentral distribution: a Poisson mixture of central ones."""
    if noncentrality <= 0:
        return chi2_tail(x, degrees)
    mean = noncentrality / 2
    spread = 12 * mean**0.5 + 40
    j = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weight = (j * math.log(mean) - mean - torch.lgamma(j + 1)).exp()
    tail = torch.special.gammaincc(degrees / 2 + j, torch.full_like(j, x / 2))
    return float((weight * tail).sum())


def _bisect(beyond: Callable[[float], bool]) -> float:
    """The point from which on ``beyond`` is true."""
    low, high = 0.0, 1.0
    while not beyond(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high
