"""Speed-up of speculative over plain decoding, its cost in operations, and the inverse problems.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, sections 3.3 to 3.5. In units of T, the time of a target pass over one token:

    c   time of a draft pass
    β   time of the target pass that verifies γ + 1 tokens; the paper assumes β = 1
    E   expected tokens per round, (1 - α^(γ+1)) / (1 - α)

    speed-up = E / (c γ + β)                                       (theorem 3.8, with β = 1)
    operations, relative to plain decoding = (ĉ γ + γ + 1) / E     (theorem 3.11)

ĉ is the ratio of arithmetic operations of a draft and a target pass over one token.
"""

from collections.abc import Callable

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_at_least, check_count, check_probability
from outrider.lab.analysis.tokens_per_round import expected_tokens

MOST_GAMMA = 256
"""The longest draft that :func:`optimal_gamma` considers."""
_HALVINGS = 80  # of an interval of length 1: to the last digit of a double


def speedup(alpha: float, gamma: float, c: float, beta: float = 1.0) -> float:
    """Tokens per second relative to plain decoding (Leviathan et al., theorem 3.8).

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round.
        c: time of a draft pass over that of a target pass.
        beta: time of the verifying pass over that of a target pass over one token.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    return expected_tokens(alpha, gamma) / round_cost(gamma, c, beta)


def round_cost(gamma: float, c: float, beta: float = 1.0) -> float:
    """Time of a round in units of a target pass over one token, c γ + β.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_at_least("gamma", gamma, 0)
    check_at_least("c", c, 0)
    if not beta > 0:
        raise InvalidParameterError(f"beta={beta!r}: must be above 0")
    return c * gamma + beta


def seconds_per_token(
    alpha: float, gamma: float, c: float, target_seconds: float, beta: float = 1.0
) -> float:
    """Seconds per emitted token, T (c γ + β) (1 - α) / (1 - α^(γ+1)).

    Args:
        alpha, gamma, c, beta: as in :func:`speedup`.
        target_seconds: T, the time of a target pass over one token.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_at_least("target_seconds", target_seconds, 0)
    return target_seconds / speedup(alpha, gamma, c, beta)


def operations_factor(alpha: float, gamma: float, c_operations: float) -> float:
    """Arithmetic operations relative to plain decoding (Leviathan et al., theorem 3.11).

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round.
        c_operations: ĉ, operations of a draft pass over those of a target pass, for one token.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_at_least("c_operations", c_operations, 0)
    return (c_operations * gamma + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: float, c: float, beta: Callable[[int], float] | None = None, most: int = MOST_GAMMA
) -> int:
    """The draft length with the highest speed-up (Leviathan et al., section 3.5, figure 3).

    Args:
        alpha: probability that a drafted token is accepted.
        c: time of a draft pass over that of a target pass.
        beta: β by the number of tokens in the verifying pass, γ + 1; None means 1 for all.
        most: the longest draft considered. It is the result where the speed-up never falls, as it
            does not for c = 0 and β = 1.

    Returns:
        γ, the smallest of equals; 0 if no draft is faster than plain decoding.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_count("most", most, 1)

    def value(gamma: int) -> float:
        return speedup(alpha, gamma, c, 1.0 if beta is None else beta(gamma + 1))

    return max(range(most + 1), key=lambda gamma: value(gamma) if gamma else 1.0)


def is_worthwhile(alpha: float, c: float) -> bool:
    """Whether some draft length is faster than plain decoding: α > c (corollary 3.9, β = 1).

    If any draft length is, then γ = 1 is, whose speed-up is (1 + α) / (1 + c).

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_probability("alpha", alpha)
    check_at_least("c", c, 0)
    return alpha > c


def largest_beta(alpha: float, gamma: float, c: float) -> float:
    """The β up to which speculative decoding is not slower than plain decoding, E - c γ.

    It is 0 or less if the draft alone takes as long as plain decoding.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_at_least("c", c, 0)
    return expected_tokens(alpha, gamma) - c * gamma


def largest_c(alpha: float, gamma: float, beta: float = 1.0) -> float:
    """The c up to which speculative decoding is not slower than plain decoding, (E - β) / γ.

    It is below 0 if not even a free draft is fast enough.

    Raises:
        InvalidParameterError: an argument outside its range, or γ = 0.
    """
    if not gamma > 0:
        raise InvalidParameterError(f"gamma={gamma!r}: must be above 0")
    return (expected_tokens(alpha, gamma) - beta) / gamma


def alpha_of_tokens(tokens: float, gamma: float) -> float:
    """The α for which a round emits this many tokens, the inverse of equation 1.

    Args:
        tokens: mean tokens per round, from 1 to γ + 1.
        gamma: drafted tokens per round, above 0.

    Raises:
        InvalidParameterError: no α gives this many tokens.
    """
    if not (gamma > 0 and 1 <= tokens <= gamma + 1):
        raise InvalidParameterError(
            f"tokens={tokens!r}: must be from 1 to gamma + 1 = {gamma + 1:g}, with gamma above 0"
        )
    if tokens == 1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return high


def alpha_for_speedup(wanted: float, gamma: float, c: float, beta: float = 1.0) -> float | None:
    """The α with this speed-up; None if α = 1 is too little.

    With ``wanted`` = 1 it is the acceptance from which on speculative decoding is faster.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_at_least("wanted", wanted, 0)
    tokens = wanted * round_cost(gamma, c, beta)
    if gamma == 0 or tokens > gamma + 1:
        return None
    return alpha_of_tokens(max(tokens, 1.0), gamma)


def tokens_of_latency(seconds_per_token: float, round_seconds: float) -> float:
    """Tokens per round from the seconds per token and per round that a paper prints.

    Raises:
        InvalidParameterError: a time of 0 or less.
    """
    for name, value in (("seconds_per_token", seconds_per_token), ("round_seconds", round_seconds)):
        if not value > 0:
            raise InvalidParameterError(f"{name}={value!r}: must be above 0")
    return round_seconds / seconds_per_token
