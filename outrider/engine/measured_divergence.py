"""How far a lossy rule diverges from the target, measured position by position.

At a verified position the rule turns the target's distribution p and the draft's q into the
distribution π of the token that is emitted there (``core.output_distribution``). Tokens that the
target emits alone, bonus included, follow p and contribute nothing. Both KL divergences add up
along an output.

Legend: B rows, D drafted tokens, M divergences, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from outrider.core import Round, Verifier, output_distribution
from outrider.core.divergences import divergences

NEGLIGIBLE = 1e-20
"""Tokens with less probability under p count as impossible in KL(p‖π): whether π has any for them
is decided by rounding, which would make the divergence infinite."""


def is_measurable(verifier: Verifier) -> bool:
    """Whether the rule is lossy and π has a closed form."""
    return (
        not verifier.lossless
        and verifier.needs == "distribution"
        and hasattr(verifier, "acceptance")
    )


def measured_divergence(round_: Round, verifier: Verifier) -> Tensor | None:
    """KL(p‖π), KL(π‖p) and total variation at each drafted position, shape (B, D, M).

    None if the rule is lossless or π has no closed form. The caller drops the positions after the
    first rejected token, which are no part of the output.
    """
    draft = round_.draft
    if not is_measurable(verifier) or not draft.is_chain or draft.num_nodes == 1:
        return None
    p_BDV = round_.p_BNV[:, :-1]
    if draft.probs_BNV is not None:
        q_BDV = draft.probs_BNV[:, :-1]
    else:
        q_BDV = one_hot(draft.tokens_BN[:, 1:], p_BDV.shape[-1]).to(p_BDV.dtype)
    p_BDV, q_BDV = _in_float64(p_BDV), _in_float64(q_BDV)
    π_BDV = output_distribution(verifier, p_BDV, q_BDV)  # type: ignore[arg-type]
    found = divergences(p_BDV, π_BDV)
    kl_BD = divergences(p_BDV.where(p_BDV >= NEGLIGIBLE, 0), π_BDV).kl
    return torch.stack([kl_BD, found.rkl, found.tv], -1)


def _in_float64(probs_BDV: Tensor) -> Tensor:
    """Distributions that sum to one in float64, so that a residual with little mass keeps it."""
    wide_BDV = probs_BDV.double()
    return wide_BDV / wide_BDV.sum(-1, keepdim=True)


def by_position(numbers: Sequence[float]) -> list[tuple[float, float, float]]:
    """A row's divergences by position, from its numbers in one sequence."""
    it = iter(numbers)
    return list(zip(it, it, it, strict=True))
