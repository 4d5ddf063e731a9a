"""Losses over full distributions: cross-entropy and the divergences of distillation.

DistillSpec (Zhou et al. 2024, https://arxiv.org/abs/2310.08461) trains the draft by minimising
E_x Σ_t D(p_t‖q_t).  The divergences D, with p the target, q the draft and α = Σ_x min(p, q), the
probability that speculative decoding accepts a drafted token:

    forward KL           KL(p‖q) = Σ_x p (log p - log q), whose gradient in q's logits is q - p
    reverse KL           KL(q‖p)
    Jensen-Shannon(β)    β KL(p‖m) + (1-β) KL(q‖m),  m = βp + (1-β)q      (Agarwal et al. 2024,
                         https://arxiv.org/abs/2306.13649, equation 1)
    total variation      ½ Σ_x |p - q| = 1 - α, the rejection rate itself
    LK hybrid            λ KL(p‖q) + (1-λ) TV(p, q),  λ = exp(-3 sg[α]) per position, sg the
                         stop-gradient (https://arxiv.org/abs/2602.23881)
    NLA                  -log α, the negative log-acceptance

Each is zero iff p = q.  Each maps logits to a loss per position, in nats, computed in float32 (in
float64 if the logits are).  The target's logits get no gradient.  The decoding temperature T
divides both logits; no factor T² corrects the gradient.  Logits may be log-probabilities, of the
vocabulary or of any partition of it into cells; -inf is probability zero.

Shapes: N positions, V vocabulary (or cells), B rows, T tokens of a row (a batch carries T+1: inputs
and shifted labels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

Objective = Callable[[Tensor], Tensor]  # tokens [B, T+1] -> scalar loss

SMALLEST_ACCEPTANCE = 1e-5
"""The α at which NLA is clamped: below it the loss is constant and has no gradient."""


class Divergence(Protocol):
    """Target and draft logits [N, V] -> loss of each position [N], at a decoding temperature."""

    def __call__(
        self, p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0
    ) -> Tensor: ...


def forward_kl(p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(p‖q) at each position, [N]."""
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    return _kl(log_p_NV, log_q_NV)


def reverse_kl(p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(q‖p) at each position, [N]."""
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    return _kl(log_q_NV, log_p_NV)


def jensen_shannon(
    p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0, *, beta: float = 0.5
) -> Tensor:
    """JS(β) at each position, [N]: β KL(p‖m) + (1-β) KL(q‖m) with m = βp + (1-β)q.

    Raises:
        ValueError: β is not between 0 and 1, where the divergence is constantly zero.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; Jensen-Shannon needs a value between 0 and 1")
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    m_NV = beta * log_p_NV.exp() + (1 - beta) * log_q_NV.exp()
    log_m_NV = m_NV.clamp(min=torch.finfo(m_NV.dtype).tiny).log()
    return beta * _kl(log_p_NV, log_m_NV) + (1 - beta) * _kl(log_q_NV, log_m_NV)


def total_variation(p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """½ Σ |p - q| = 1 - α at each position, [N].

    Its gradient vanishes where q and p hardly overlap, so train with KL first.
    """
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    return _total_variation(log_p_NV, log_q_NV)


def lk_hybrid(
    p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0, *, decay: float = 3.0
) -> Tensor:
    """λ KL(p‖q) + (1-λ) TV(p, q) at each position, [N], with λ = exp(-decay sg[α]).

    Where little is accepted, the loss is KL, whose gradient does not vanish; where much is
    accepted, it is the rejection rate.
    """
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    tv_N = _total_variation(log_p_NV, log_q_NV)
    share_N = torch.exp(-decay * (1 - tv_N.detach()))
    return share_N * _kl(log_p_NV, log_q_NV) + (1 - share_N) * tv_N


def negative_log_acceptance(
    p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float = 1.0
) -> Tensor:
    """-log α at each position, [N], with α clamped from below at ``SMALLEST_ACCEPTANCE``."""
    log_p_NV, log_q_NV = _log_probs(p_logits_NV, q_logits_NV, temperature)
    alpha_N = 1 - _total_variation(log_p_NV, log_q_NV)
    return -alpha_N.clamp(min=SMALLEST_ACCEPTANCE).log()


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "lk": lk_hybrid,
    "nla": negative_log_acceptance,
}
"""The divergences by the names of the command line."""


def weighted_mean(loss_N: Tensor, weight_N: Tensor | None = None) -> Tensor:
    """Σ weight · loss / Σ weight; the plain mean without weights, zero if all weights are zero.

    Positions of weight zero have no influence, and get no gradient, even where their loss is not
    finite.
    """
    if weight_N is None:
        return loss_N.mean()
    weight_N = weight_N.to(loss_N.dtype)
    kept_N = loss_N.masked_fill(weight_N == 0, 0.0)
    total = weight_N.sum()
    return (weight_N * kept_N).sum() / torch.where(total == 0, 1.0, total)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels: -log softmax(logits)[label]."""
    return functional.cross_entropy(logits_NV.float(), labels_N)


def language_modelling(model: PreTrainedModel) -> Objective:
    """Cross-entropy of the next token."""

    def objective(tokens_BT: Tensor) -> Tensor:
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        return cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    return objective


def _log_probs(
    p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """log p and log q at a temperature, in float32 or better; log p is detached."""
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}; a divergence needs one above zero (at temperature 0 "
            "both distributions are one-hot and no gradient exists)"
        )
    dtype = torch.promote_types(
        torch.promote_types(p_logits_NV.dtype, q_logits_NV.dtype), torch.float32
    )
    log_p_NV = (p_logits_NV.detach().to(dtype) / temperature).log_softmax(-1)
    log_q_NV = (q_logits_NV.to(dtype) / temperature).log_softmax(-1)
    return log_p_NV, log_q_NV


def _kl(log_a_NV: Tensor, log_b_NV: Tensor) -> Tensor:
    """KL(a‖b) at each position.  Terms with a = 0 are zero, and so are their gradients."""
    a_NV = log_a_NV.exp()
    return (a_NV * (log_a_NV - log_b_NV).masked_fill(a_NV == 0, 0.0)).sum(-1)


def _total_variation(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    return 0.5 * (log_p_NV.exp() - log_q_NV.exp()).abs().sum(-1)
