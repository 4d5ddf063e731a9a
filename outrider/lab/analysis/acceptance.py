"""Estimators of α, the probability that a drafted token is accepted.

Leviathan, Kalman and Matias, ICML 2023, section 3.2: α = E[Σ_x min(p(x), q(x))], the mean over
contexts of the overlap of target distribution p and draft distribution q; the overlap is one less
the total variation (their theorem 3.5). What a run lets one compute differs:

    from the distributions     the mean of Σ_x min(p, q), unbiased for the contexts it covers
    from single draws          the mean of min(1, p(x) / q(x)), x ~ q: unbiased, more variance
    from accepted tokens       accepted / verified, the maximum-likelihood estimate
    from the acceptance rate   accepted / drafted: too low, since γ tokens are drafted in every
                               round, but those after a rejection are never verified

If every token is accepted independently with probability α, then of γ drafted tokens

    E[accepted / drafted] = (E[X] - 1) / γ = α (1 - α^γ) / (γ (1 - α)) <= α

The likelihood of m rounds with n_1, …, n_m accepted tokens, r of which rounds end in a rejection,
is Π α^(n_i) (1 - α)^r. A round whose draft was accepted whole is censored and has no factor
(1 - α). The maximum lies at Σ n / (Σ n + r), where Σ n + r is the number of verified tokens.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_probability
from outrider.lab.analysis.speedup import alpha_of_tokens
from outrider.lab.analysis.tokens_per_round import expected_tokens


@dataclass(frozen=True)
class Estimate:
    """An estimate with its standard error.

    Attributes:
        value: the estimate.
        error: standard error; infinite if the data do not determine it.
    """

    value: float
    error: float


def overlap(p: Iterable[float], q: Iterable[float]) -> float:
    """Σ_x min(p(x), q(x)): the probability that a token drawn from q is accepted.

    Args:
        p, q: distributions over the same tokens.
    """
    return math.fsum(min(a, b) for a, b in zip(p, q, strict=True))


def alpha_of_samples(samples: Sequence[float]) -> Estimate:
    """α as the mean over verified positions of ``overlap(p, q)``, or of min(1, p(x) / q(x)).

    The standard error counts positions as independent. Positions of one output are correlated, so
    for an error bar over prompts resample whole prompts.

    Raises:
        InvalidParameterError: no samples.
    """
    if not samples:
        raise InvalidParameterError("samples=[]: pass the overlap of at least one position")
    n = len(samples)
    mean = math.fsum(samples) / n
    if n == 1:
        return Estimate(mean, math.inf)
    variance = math.fsum((s - mean) ** 2 for s in samples) / (n - 1)
    return Estimate(mean, math.sqrt(variance / n))


def alpha_of_counts(accepted: Sequence[int], drafted: Sequence[int]) -> Estimate:
    """The maximum-likelihood α of the accepted and drafted tokens of each round.

    A round with fewer accepted than drafted tokens ends in a rejection. Rounds that the end of the
    output cut short must be given with the drafted tokens before the end.

    The standard error is from the Fisher information, verified / (α (1 - α)).

    Args:
        accepted: accepted tokens of each round.
        drafted: drafted tokens of each round.

    Raises:
        InvalidParameterError: no token was drafted, or a round accepted more than it drafted.
    """
    rounds = list(zip(accepted, drafted, strict=True))
    if any(not 0 <= n <= gamma for n, gamma in rounds):
        raise InvalidParameterError("accepted: a round cannot accept more tokens than it drafted")
    total = sum(accepted)
    return alpha_of_totals(total, total + sum(n < gamma for n, gamma in rounds))


def alpha_of_totals(accepted: int, verified: int) -> Estimate:
    """The maximum-likelihood α of the number of accepted and of verified tokens.

    Raises:
        InvalidParameterError: nothing was verified, or more was accepted than verified.
    """
    if not 0 <= accepted <= verified or verified == 0:
        raise InvalidParameterError(
            f"verified={verified}: must be above 0 and not below the {accepted} accepted tokens"
        )
    alpha = accepted / verified
    return Estimate(alpha, math.sqrt(alpha * (1 - alpha) / verified))


def alpha_by_position(
    accepted_at: Sequence[int], verified_at: Sequence[int], z: float = 1.96
) -> list[tuple[float, float, float]]:
    """Acceptance at each position of the draft, with its Wilson score interval.

    Acceptance that rises with the position shows a mixture: rounds that come far are those in easy
    text, and expected tokens computed from a single α are then too few.

    Args:
        accepted_at: accepted tokens by position.
        verified_at: verified tokens by position.
        z: standard-normal quantile; 1.96 gives intervals of 95 %.

    Returns:
        The share, its lower and its upper limit, for each position that was ever verified.
    """
    limits = []
    for accepted, verified in zip_longest(accepted_at, verified_at, fillvalue=0):
        if not verified:
            break
        limits.append((accepted / verified, *wilson(accepted, verified, z)))
    return limits


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a proportion (Wilson, 1927). ``trials`` must be above 0."""
    share, weight = successes / trials, z * z / trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def expected_acceptance_rate(alpha: float, gamma: float) -> float:
    """E[accepted / drafted] under independent acceptance, which is at most α.

    Raises:
        InvalidParameterError: an argument outside its range, or γ = 0.
    """
    if not gamma > 0:
        raise InvalidParameterError(f"gamma={gamma!r}: must be above 0")
    return (expected_tokens(alpha, gamma) - 1) / gamma


def alpha_of_rate(rate: float, gamma: float) -> float:
    """The α behind an acceptance rate (accepted / drafted), the inverse of the above.

    Raises:
        InvalidParameterError: an argument outside its range, or γ = 0.
    """
    check_probability("rate", rate)
    return alpha_of_tokens(1 + rate * gamma, gamma)
