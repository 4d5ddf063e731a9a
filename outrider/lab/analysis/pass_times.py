"""Speed-up at a batch size, from measured times of forward passes.

A target pass over n tokens takes t(n). Of a batch of b sequences, plain decoding scores b tokens
per pass, and verification b (γ + 1). So β depends on both:

    β(γ, b) = t(b (γ + 1)) / t(b)        speed-up = E / (γ d(b) / t(b) + β(γ, b))

with d(b) the time of a draft pass over b tokens. β rises with b where the passes become bound by
arithmetic, until speculation no longer pays.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_count
from outrider.lab.analysis.speedup import speedup

PassTime = Callable[[int], float]
"""Seconds of a forward pass by its number of tokens."""


def interpolated(times: Mapping[int, float], num: float) -> float:
    """The time for ``num`` tokens, interpolated linearly between measured numbers of tokens.

    Beyond the largest, and below the smallest, it is extrapolated from the nearest two.

    Args:
        times: seconds by number of tokens, at least one entry.
        num: number of tokens.
    """
    sizes = sorted(times)
    if len(sizes) == 1:
        return times[sizes[0]]
    i = min(max(bisect_left(sizes, num), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    share = (num - low) / (high - low)
    return (1 - share) * times[low] + share * times[high]


def beta_at(target: PassTime, gamma: int, batch: int = 1) -> float:
    """β: the time of the verifying pass over that of plain decoding's pass.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_count("gamma", gamma, 0)
    check_count("batch", batch, 1)
    return target(batch * (gamma + 1)) / target(batch)


def speedup_at_batch(
    alpha: float, gamma: int, target: PassTime, draft: PassTime, batch: int = 1
) -> float:
    """Speed-up over plain decoding with the same batch size.

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round.
        target, draft: seconds of a pass by its number of tokens.
        batch: number of sequences.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    beta = beta_at(target, gamma, batch)
    return speedup(alpha, gamma, draft(batch) / target(batch), beta)


def largest_batch(
    alpha: float, gammas: Sequence[int], target: PassTime, draft: PassTime, most: int
) -> int:
    """The last batch size, counting up from 1, at which some draft length is faster than none.

    Args:
        alpha: probability that a drafted token is accepted.
        gammas: draft lengths to choose from at each batch size, each at least 1.
        target, draft: seconds of a pass by its number of tokens.
        most: the largest batch size considered; the result if speculation still pays there.

    Returns:
        0 if speculation does not pay at batch size 1.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    if not gammas:
        raise InvalidParameterError("gammas=[]: pass at least one draft length")
    for gamma in gammas:
        check_count("gamma", gamma, 1)
    for batch in range(1, most + 1):
        if all(speedup_at_batch(alpha, gamma, target, draft, batch) <= 1 for gamma in gammas):
            return batch - 1
    return most
