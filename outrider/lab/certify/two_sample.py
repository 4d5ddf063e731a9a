"""The end-to-end check: continuations by the method against continuations by plain decoding.

Chi-square tests of homogeneity. Of n continuations from each side, a_c and b_c fall into cell c.

    X² = Σ_c (a_c - b_c)² / (a_c + b_c)

is chi-square with C-1 degrees of freedom if both sides have the same distribution. For
distributions P and Q it is noncentral with

    λ = n Σ_c (P_c - Q_c)² / (P_c + Q_c)  >=  n (Σ_c |P_c - Q_c|)² / Σ_c (P_c + Q_c)  =  2 n δ²

(Cauchy-Schwarz), where δ is the total variation between the cells. The statistics of m prompts are
added, and by convexity so are the bounds: λ >= 2 n m δ², with δ the mean over prompts. This gives
the smallest δ that the test detects with a given probability.

Cells are formed from the counts of both sides together. That does not bias the test, since the
total count of a cell carries no information about which side its continuations are from.

Legend: B continuations, T tokens, C cells.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.lab.certify.report import FALSE_ALARM, POWER, STATISTICAL_CHECKS, Check

NAME = "outputs"
_MIN_COUNT = 20  # of a cell, both sides together
_CELLS = 24  # cells with less than one part in this many of all continuations are pooled


@dataclass(frozen=True)
class Homogeneity:
    """The statistic X² of a homogeneity test, with its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        return chi2_tail(self.statistic, self.degrees) if self.degrees else 1.0


def check(by_method: Sequence[Tensor], by_plain: Sequence[Tensor], verified: bool) -> Check:
    """Tests every prefix and every single token over all prompts.

    Args:
        by_method: continuations of each prompt by the method, (B, T).
        by_plain: the same by plain decoding.
        verified: whether a deviation fails the check; without, it is only reported.
    """
    T = by_method[0].shape[1]
    tests: list[Homogeneity] = []
    for last in range(1, T + 1):
        spans = [slice(0, last)] if last == 1 else [slice(0, last), slice(last - 1, last)]
        for span in spans:
            parts = [
                homogeneity(a[:, span], b[:, span])
                for a, b in zip(by_method, by_plain, strict=True)
            ]
            tests.append(
                Homogeneity(sum(p.statistic for p in parts), sum(p.degrees for p in parts))
            )
    tests = [test for test in tests if test.degrees]
    if not tests:
        return Check.skipped(NAME, "all continuations are equal, or they are too few for a test")
    num = sum(len(a) for a in by_method)
    threshold = FALSE_ALARM / STATISTICAL_CHECKS
    p_value = min(1.0, min(test.p_value for test in tests) * len(tests))
    found = max(detectable_deviation(num, test.degrees, threshold / len(tests)) for test in tests)
    words = f"p-value, {num} outputs of {T} tokens against plain decoding, {len(tests)} tests"
    claim = "too few outputs for an end-to-end statement"
    if found < 1:
        claim = f"end-to-end deviation > {found:.2g} would have been found with probability {POWER}"
    words += f"; fails below {threshold:.2g}"
    if not verified:
        return Check(NAME, None, p_value, words)
    return Check(NAME, p_value > threshold, p_value, words, claim)


def homogeneity(a_BT: Tensor, b_BT: Tensor) -> Homogeneity:
    """The test of two samples of the same size; rare sequences are pooled into one cell."""
    _, cell_B = torch.cat([a_BT, b_BT]).unique(dim=0, return_inverse=True)
    num_cells = int(cell_B.max()) + 1
    a_C, b_C = (
        torch.bincount(part, minlength=num_cells).double() for part in cell_B.split(len(a_BT))
    )
    small_C = a_C + b_C < max(_MIN_COUNT, 2 * len(a_BT) / _CELLS)
    a_C = torch.cat([a_C[~small_C], a_C[small_C].sum()[None]])
    b_C = torch.cat([b_C[~small_C], b_C[small_C].sum()[None]])
    if 0 < float(a_C[-1] + b_C[-1]) < _MIN_COUNT and len(a_C) > 1:
        smallest = int((a_C + b_C)[:-1].argmin())  # merge a pool that is too small itself
        a_C[smallest] += a_C[-1]
        b_C[smallest] += b_C[-1]
        a_C, b_C = a_C[:-1], b_C[:-1]
    both_C = a_C + b_C
    terms_C = torch.where(both_C > 0, (a_C - b_C) ** 2 / both_C, 0.0)
    return Homogeneity(float(terms_C.sum()), int((both_C > 0).sum()) - 1)


def detectable_deviation(num: int, degrees: int, false_alarm: float, power: float = POWER) -> float:
    """The smallest total variation that a test detects with probability ``power``.

    Args:
        num: continuations on each side.
        degrees: degrees of freedom.
        false_alarm: probability that the test rejects equal distributions.
        power: probability of detection.
    """
    critical = _bisect(lambda x: chi2_tail(x, degrees) < false_alarm)
    noncentrality = _bisect(lambda size: ncx2_tail(critical, degrees, size) > power)
    return float((noncentrality / (2 * num)) ** 0.5)


def chi2_tail(x: float, degrees: float) -> float:
    """P(X² > x)."""
    halves = torch.tensor([degrees / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def ncx2_tail(x: float, degrees: float, noncentrality: float) -> float:
    """P(X² > x) of the noncentral chi-square: a Poisson mixture of central ones."""
    if noncentrality <= 0:
        return chi2_tail(x, degrees)
    mean = noncentrality / 2
    spread = 12 * mean**0.5 + 40
    j = torch.arange(max(0, int(mean - spread)), int(mean + spread) + 1, dtype=torch.float64)
    weight = (j * math.log(mean) - mean - torch.lgamma(j + 1)).exp()
    tail = torch.special.gammaincc(degrees / 2 + j, torch.full_like(j, x / 2))
    return float((weight * tail).sum())


def _bisect(beyond: Callable[[float], bool]) -> float:
    """The smallest positive number at which ``beyond`` is true; it must be monotone."""
    low, high = 0.0, 1.0
    while not beyond(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return high
