"""How many experts of a mixture-of-experts layer a forward pass reads, and the β that follows.

If each token is routed to k of E experts, uniformly and independently of the other tokens, then a
pass over T tokens touches

    E (1 - ((E - k) / E)^T)

experts on average. The survey post "Speculative Decoding" (section "Mixture of Experts") derives
this formula, but inserts k / E in place of (E - k) / E, and counts T = γ tokens where a pass that
verifies γ drafted tokens scores γ + 1. Real routing is correlated between neighbouring tokens, so
that fewer experts are touched.
"""

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_count


def experts_touched(num_experts: int, per_token: int, tokens: int) -> float:
    """Expected number of different experts that a pass over ``tokens`` tokens reads.

    Args:
        num_experts: E, experts per layer.
        per_token: k, experts per token, 1 to E.
        tokens: T, tokens in the pass.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    for name, value, least in (
        ("num_experts", num_experts, 1),
        ("per_token", per_token, 1),
        ("tokens", tokens, 0),
    ):
        check_count(name, value, least)
    if per_token > num_experts:
        raise InvalidParameterError(
            f"per_token={per_token}: must be at most the {num_experts} experts of the layer"
        )
    missed: float = (1 - per_token / num_experts) ** tokens
    return num_experts * (1 - missed)


def experts_beta(num_experts: int, per_token: int, gamma: int) -> float:
    """β of a layer whose time is that of reading its experts: experts touched by γ + 1 tokens ÷ k.

    Raises:
        InvalidParameterError: an argument outside its range.
    """
    return experts_touched(num_experts, per_token, gamma + 1) / per_token
