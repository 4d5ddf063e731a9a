"""Losses of block heads, over the slots of many blocks at once.

    DFlash   Σ_k w_k KL(p‖q_k),                                w_k = exp(-(k-1)/γ)
    DSpark   Σ_k w_k (0.1 KL(p‖q_k) + 0.9 TV(p, q_k) + BCE(a_k, α_k)),   α_k = Σ_x min(p, q_k)

each divided by the sum of its weights; k counts the slots from 1, a_k is the head's confidence and
α_k, which gets no gradient, the probability that its token is accepted. With a reduced vocabulary
TV and α are those over all tokens: q is zero outside. KL is that from the target's distribution
within the vocabulary, weighted by its mass there (``teacher.py``).

The papers have the cross-entropy with the output token where KL is here: the same gradient in
expectation over outputs that the target wrote at temperature 1, without the noise of one sample.

The confidence is trained on Σ min(p, q), an expectation over the drafted token, as a draft that
stops in front of a slot needs.

Legend: N slots of all blocks that count, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from outrider.core.errors import InvalidParameterError
from outrider.train.losses import forward_kl, weighted_mean


@dataclass(frozen=True)
class BlockLoss:
    """A weighted sum of three losses.

    Attributes:
        kl: weight of KL(p‖q).
        tv: weight of the total variation.
        confidence: weight of the confidence's cross-entropy.
        gamma: γ, over how many slots the weights fall by a factor of e.

    Raises:
        InvalidParameterError: a negative weight, or a γ that is not positive.
    """

    kl: float = 1.0
    tv: float = 0.0
    confidence: float = 0.0
    gamma: float = 4.0

    def __post_init__(self) -> None:
        for name in ("kl", "tv", "confidence"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidParameterError(
                    f"{name}={getattr(self, name)}: a loss's weight must be 0 or greater"
                )
        if not self.gamma > 0:
            raise InvalidParameterError(f"gamma={self.gamma}: must be above 0")

    def weights(self, slot_N: Tensor) -> Tensor:
        """w of each slot, numbered from 0."""
        return torch.exp(-slot_N.float() / self.gamma)

    def __call__(
        self,
        p_logits_ND: Tensor,
        log_norm_N: Tensor,
        q_logits_ND: Tensor,
        slot_N: Tensor,
        confidence_N: Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            p_logits_ND: the target's logits over the draft vocabulary.
            log_norm_N: log Σ exp of its logits over all tokens.
            q_logits_ND: the head's.
            slot_N: number of each slot in its block, from 0.
            confidence_N: logits of the head's confidence; None where it has none.
        """
        weight_N = self.weights(slot_N)
        log_p_ND = p_logits_ND.detach().float() - log_norm_N[:, None].float()
        mass_N = log_p_ND.logsumexp(-1).exp().clamp(max=1.0)
        kl_N = forward_kl(p_logits_ND, q_logits_ND)
        loss = self.kl * weighted_mean(kl_N, weight_N * mass_N)
        if not self.tv and confidence_N is None:
            return loss
        acceptance_N = acceptance(log_p_ND, q_logits_ND)
        loss = loss + self.tv * weighted_mean(1 - acceptance_N, weight_N)
        if confidence_N is None:
            return loss
        bce_N = binary_cross_entropy_with_logits(
            confidence_N.float(), acceptance_N.detach().clamp(0, 1), reduction="none"
        )
        return loss + self.confidence * weighted_mean(bce_N, weight_N)


def acceptance(log_p_ND: Tensor, q_logits_ND: Tensor) -> Tensor:
    """α = Σ_x min(p, q), (N,), of probabilities p that need not sum to one and q that do."""
    q_ND = q_logits_ND.float().softmax(-1)
    return torch.minimum(log_p_ND.exp(), q_ND).sum(-1)
