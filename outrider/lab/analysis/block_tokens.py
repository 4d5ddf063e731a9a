"""Expected tokens per round with block verification, at positions with known distributions.

Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025. With the running ratio

    P_0 = 1,   P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))

block verification accepts at least i tokens of a draft x_1 … x_γ with probability P_i. So

    E[X] = 1 + Σ_i E_{x ~ q}[P_i]

Token-level verification takes the product of min(1, p/q) in place of P_i, which is never larger.
Both are computed exactly here, for positions that are independent and have the same p and q, as in
the paper's example (p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: 11/9 against 10/9 accepted tokens).
"""

from collections import defaultdict
from collections.abc import Sequence

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.acceptance import overlap
from outrider.lab.analysis.domain import check_count
from outrider.lab.analysis.tokens_per_round import expected_tokens

_DIGITS = 12  # ratios that agree to this many digits are one state


def block_tokens(p: Sequence[float], q: Sequence[float], gamma: int) -> float:
    """E[X] of block verification, by recursion over the values of P_i.

    Args:
        p: target distribution of every position.
        q: draft distribution of every position.
        gamma: drafted tokens per round. The number of different values of P_i, and so the time,
            grows like γ to the power of the number of different ratios p/q less one.

    Raises:
        InvalidParameterError: not two distributions over the same tokens.
    """
    _check(p, q)
    check_count("gamma", gamma, 0)
    drawn = [(b, a / b) for a, b in zip(p, q, strict=True) if b > 0]
    total, states = 1.0, {1.0: 1.0}
    for _ in range(gamma):
        after: dict[float, float] = defaultdict(float)
        for reached, weight in states.items():
            for probability, ratio in drawn:
                after[round(min(1.0, reached * ratio), _DIGITS)] += weight * probability
        states = after
        total += sum(reached * weight for reached, weight in states.items())
    return total


def chain_tokens(p: Sequence[float], q: Sequence[float], gamma: int) -> float:
    """E[X] of token-level verification at the same positions, for comparison.

    Raises:
        InvalidParameterError: not two distributions over the same tokens.
    """
    return expected_tokens(min(1.0, overlap(p, q)), gamma)


def _check(p: Sequence[float], q: Sequence[float]) -> None:
    for name, values in (("p", p), ("q", q)):
        if len(p) != len(q) or min(values, default=-1) < 0 or abs(sum(values) - 1) > 1e-9:
            raise InvalidParameterError(
                f"{name}={list(values)!r}: must be probabilities that add up to 1, as many in p as "
                f"in q"
            )
