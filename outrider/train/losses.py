"""Losses over full distributions, in float32: cross-entropy and the divergences of distillation.

DistillSpec (Zhou et al. 2024, https://arxiv.org/abs/2310.08461) trains the draft by minimising
E_x Σ_t D(p_t‖q_t).  With D the forward KL and x from the corpus it is supervised distillation:

    KL(p‖q) = Σ_x p(x) (log p(x) − log q(x)),      p target, q draft

which is zero iff p = q, and whose gradient in the draft's logits is q − p.  With D the total
variation the loss is 1 − α, the rejection rate of speculative decoding.

Shapes: N positions, V vocabulary, B rows, T tokens of a row (a batch carries T+1: inputs and
shifted labels).  Every loss is a mean over positions, in nats per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

Objective = Callable[[Tensor], Tensor]  # tokens [B, T+1] -> scalar loss
Divergence = Callable[[Tensor, Tensor], Tensor]  # target and draft logits [N, V] -> scalar loss


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels: -log softmax(logits)[label]."""
    return functional.cross_entropy(logits_NV.float(), labels_N)


def forward_kl(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """Mean KL(p‖q) from target logits to draft logits; no gradient reaches the target."""
    log_p_NV = p_logits_NV.detach().float().log_softmax(-1)
    log_q_NV = q_logits_NV.float().log_softmax(-1)
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).mean()


def total_variation(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """Mean 1 - Σ min(p, q), which is 1 - α itself; no gradient reaches the target.

    Its gradient vanishes where q and p hardly overlap, so train with KL first.
    """
    p_NV = p_logits_NV.detach().float().softmax(-1)
    q_NV = q_logits_NV.float().softmax(-1)
    return 1 - torch.minimum(p_NV, q_NV).sum(-1).mean()


def language_modelling(model: PreTrainedModel) -> Objective:
    """Cross-entropy of the next token."""

    def objective(tokens_BT: Tensor) -> Tensor:
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        return cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    return objective
