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
    found = divergences(p_BDV, output_distribution(verifier, p_BDV, q_BDV))  # type: ignore[arg-type]
    return torch.stack([found.kl, found.rkl, found.tv], -1)


def by_position(numbers: Sequence[float]) -> list[tuple[float, float, float]]:
    """A row's divergences by position, from its numbers in one sequence."""
    it = iter(numbers)
    return list(zip(it, it, it, strict=True))
