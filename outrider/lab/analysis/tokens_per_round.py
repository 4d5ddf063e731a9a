"""How many tokens a round emits: distribution, mean and variance.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, section 3.1. A round drafts γ tokens, accepts them up to the first rejection, and adds one
token of the target. If every token is accepted independently with the same probability α, then the
number X of emitted tokens is a geometric variable capped at γ + 1:

    P(X > n) = α^n  for n = 0 … γ,        E[X] = (1 - α^(γ+1)) / (1 - α)       (equation 1)

Where acceptance is not independent, two more general forms are exact: the probabilities by
position, and a mixture over α. E[X] is convex in α, so by Jensen's inequality a mixture emits more
tokens than E[X] of the mean α.
"""

import math
from collections.abc import Sequence

from outrider.lab.analysis.domain import check_at_least, check_count, check_probability


def expected_tokens(alpha: float, gamma: float) -> float:
    """E[X], the expected tokens per round (Leviathan et al., equation 1).

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round. A mean over rounds may be a fraction.

    Returns:
        Tokens, from 1 to γ + 1.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_probability("alpha", alpha)
    check_at_least("gamma", gamma, 0)
    if alpha == 1:
        return gamma + 1
    if alpha == 0:
        return 1.0
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)  # exact where α is near 1


def token_probabilities(alpha: float, gamma: int) -> list[float]:
    """P(X = 1), …, P(X = γ + 1).

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_probability("alpha", alpha)
    check_count("gamma", gamma, 0)
    return [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]


def token_variance(alpha: float, gamma: int) -> float:
    """Var[X], in tokens².

    From E[X²] = Σ_n (2n + 1) P(X > n), for n = 0 … γ. The variance grows with γ: this is why Chen
    et al. (2023, figure 1) find that the time of whole generations varies more with longer drafts.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_probability("alpha", alpha)
    check_count("gamma", gamma, 0)
    mean = sum(alpha**n for n in range(gamma + 1))
    return sum((2 * n + 1) * alpha**n for n in range(gamma + 1)) - mean**2


def expected_tokens_by_position(acceptance: Sequence[float]) -> float:
    """E[X] from the acceptance at each position, whatever the dependence between positions.

    E[X] = 1 + a_1 + a_1 a_2 + …, where a_i is the probability that the i-th drafted token is
    accepted if all before it were.

    Raises:
        InvalidParameterError: a value that is not a probability.
    """
    total = reached = 1.0
    for a in acceptance:
        check_probability("acceptance", a)
        reached *= a
        total += reached
    return total


def expected_tokens_of_mixture(a: float, b: float, gamma: int) -> float:
    """E[X] where each round draws its α from a Beta distribution.

    E[α^n] = Π_{j<n} (a + j) / (a + b + j), so E[X] = Σ_n E[α^n] for n = 0 … γ.

    Args:
        a, b: parameters of the Beta distribution, above 0. The mean of α is a / (a + b).
        gamma: drafted tokens per round.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    for name, value in (("a", a), ("b", b)):
        check_at_least(name, value, math.ulp(0.0))
    check_count("gamma", gamma, 0)
    return expected_tokens_by_position([(a + j) / (a + b + j) for j in range(gamma)])


def rounds_of_generation(alpha: float, gamma: int, tokens: int) -> tuple[float, float]:
    """Mean and variance of the number of rounds that emit a given number of tokens.

    Exact under independent acceptance, by recursion over the tokens that are left; the last round
    may draft beyond the end. With a constant time per round, the standard deviation of the time of
    a whole generation is the time of a round times the root of this variance (Chen et al., figure
    1, left).

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round.
        tokens: length of the generation, at least 1.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    check_count("tokens", tokens, 1)
    probabilities = token_probabilities(alpha, gamma)
    mean, square = [0.0], [0.0]  # by the tokens that are left
    for left in range(1, tokens + 1):
        after = [(p, max(0, left - x)) for x, p in enumerate(probabilities, 1)]
        more = sum(p * mean[rest] for p, rest in after)
        mean.append(1 + more)
        square.append(1 + 2 * more + sum(p * square[rest] for p, rest in after))
    return mean[-1], square[-1] - mean[-1] ** 2
