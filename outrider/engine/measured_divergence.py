"""How far a lossy rule really strays: the divergences of a round, place by place.

At a verified place the rule turns the target's distribution p and the draft's q into the
distribution π of the token that is emitted there (``core.output_distribution``). Tokens the target
writes alone, bonus included, follow p and cost nothing. Both KL divergences add up along a text.

Legend: B rows, D drafted places (N-1), M measures, V vocabulary.
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
    """KL(p‖π), KL(π‖p) and total variation at each drafted place, shape (B, D, M).

    None if the rule is lossless or π has no closed form.

    Those beyond the first refused place are no part of the text; the caller leaves them out.
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


def per_place(numbers: Sequence[float]) -> list[tuple[float, float, float]]:
    """A row's numbers, read from the device, by place."""
    it = iter(numbers)
    return list(zip(it, it, it, strict=True))
