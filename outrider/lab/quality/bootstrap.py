"""Paired bootstrap: is the difference of two methods more than the choice of prompts?

Both methods answered the same prompts. A resample draws as many prompts with replacement, the same
ones for both methods, and computes the metric of each; the differences of many resamples show how
far the difference varies with the prompts. Pairing removes what makes a prompt easy or hard for
both methods alike.

Philipp Koehn, Statistical Significance Tests for Machine Translation Evaluation, EMNLP 2004. The
interval is Efron's percentile interval: for few prompts (below 30, say) it is too narrow.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from outrider.core.errors import InvalidParameterError
from outrider.core.values import is_finite, is_whole, shown

Item = TypeVar("Item")


@dataclass(frozen=True)
class Difference:
    """The difference a - b of a metric.

    Attributes:
        a, b: the metric of each method on all prompts.
        value: a - b.
        low, high: ends of the interval.
        confidence: of the interval.
        probability: share of resamples in which a exceeds b, ties counted as half.
        num_prompts: on which both were computed.
    """

    a: float
    b: float
    value: float
    low: float
    high: float
    confidence: float
    probability: float
    num_prompts: int

    @property
    def is_significant(self) -> bool:
        """Whether the interval leaves out 0."""
        return not self.low <= 0 <= self.high

    def as_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {**vars(self), "significant": self.is_significant}


def paired_bootstrap(
    a: Sequence[Item],
    b: Sequence[Item],
    statistic: Callable[[Sequence[Item]], float] = statistics.fmean,  # type: ignore[assignment]
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The difference of a metric between two methods, with its interval over prompts.

    Several outputs of one prompt belong into one item (their mean, or all of them together): the
    outputs of one prompt are not independent.

    Args:
        a: one item per prompt: its score, or whatever ``statistic`` reads.
        b: the same of the other method, in the same order.
        statistic: the metric of a collection of items; by default their mean.
        num_resamples: how many.
        confidence: of the interval, such as 0.95.
        seed: of the resamples.

    Raises:
        InvalidParameterError: not as many items in both, or none; numbers out of range.
    """
    if len(a) != len(b) or not a:
        raise InvalidParameterError(
            f"{len(a)} and {len(b)} prompts: a paired comparison needs the same prompts of both "
            "methods, and at least one"
        )
    if not is_whole(num_resamples) or num_resamples < 1:
        raise InvalidParameterError(f"num_resamples={shown(num_resamples)}: must be at least 1")
    if not is_finite(confidence) or not 0 < confidence < 1:
        raise InvalidParameterError(f"confidence={shown(confidence)}: must be between 0 and 1")
    num = len(a)
    generator = np.random.Generator(np.random.PCG64(seed))
    differences = np.empty(num_resamples)
    for resample in range(num_resamples):
        drawn = generator.integers(num, size=num).tolist()
        differences[resample] = statistic([a[i] for i in drawn]) - statistic([b[i] for i in drawn])
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, (tail, 1 - tail)).tolist()
    wins = float(np.mean(differences > 0) + np.mean(differences == 0) / 2)
    of_a, of_b = float(statistic(a)), float(statistic(b))
    return Difference(of_a, of_b, of_a - of_b, low, high, confidence, wins, num)
