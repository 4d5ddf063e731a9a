"""A loss of an output layer's logits, which never exist for all positions at once.

    L = Σ_n l(z_n),   z_n = W h_n

The logits of a few positions are computed, their loss, its gradient in the logits, and from that
the gradients of h and W, before the next positions follow: the logits of a large vocabulary stay in
the processor's cache, and memory is needed for those of one chunk. This is the fused linear
cross-entropy of Liger Kernel (Hsu et al. 2024, section 3.2, https://arxiv.org/abs/2410.10989) for
any loss that is a sum over positions.

Legend: N positions, C positions of a chunk, H width of the hidden states, D vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ON_CPU = 1 << 22  # 8 MiB in bfloat16, which a processor's cache holds
_ELSEWHERE = 1 << 26  # small products would leave a GPU idle

LossOfChunk = Callable[[Tensor, slice], Tensor]
"""Maps the logits (C, …, D) of a chunk of positions, and which they are, to their loss, a scalar.
Only the logits get a gradient."""


def fused_linear_loss(
    hidden_NH: Tensor, weight_DH: Tensor, loss_of: LossOfChunk, chunk: int | None = None
) -> Tensor:
    """Σ over chunks of ``loss_of(W h)``, a scalar that can be differentiated once in both tensors.

    The products are computed in the dtype of autocast where that is on.

    Args:
        hidden_NH: hidden states, (N, …, H).
        weight_DH: the output layer's weight.
        loss_of: the loss of a chunk; the losses of the chunks add up.
        chunk: most logits of a chunk, which has at least one position; None takes as many as the
            device computes fast.
    """
    per_position = weight_DH.shape[0] * hidden_NH[:1, ..., 0].numel()
    size = chunk_size(per_position, hidden_NH.device, chunk)
    total: Tensor = _FusedLinearLoss.apply(hidden_NH, weight_DH, loss_of, size)
    return total


def chunk_size(per_position: int, device: torch.device, chunk: int | None = None) -> int:
    """Positions to compute at once, at least one.

    Args:
        per_position: logits of a position.
        device: where they are computed.
        chunk: as of :func:`fused_linear_loss`.
    """
    if chunk is None:
        chunk = _ON_CPU if device.type == "cpu" else _ELSEWHERE
    return max(1, chunk // max(1, per_position))


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that a product with a tensor is computed in: autocast's, or its own."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class _FusedLinearLoss(torch.autograd.Function):
    """Computes the gradients along with the loss, and scales them when asked for them."""

    @staticmethod
    def forward(
        context: Any, hidden_NH: Tensor, weight_DH: Tensor, loss_of: LossOfChunk, size: int
    ) -> Tensor:
        dtype = product_dtype(hidden_NH)
        h_NH, w_DH = hidden_NH.detach().to(dtype), weight_DH.detach().to(dtype)
        h_grad_NH, w_grad_DH = torch.zeros_like(hidden_NH), torch.zeros_like(weight_DH)
        total = torch.zeros((), device=hidden_NH.device, dtype=hidden_NH.dtype)
        for first in range(0, len(h_NH), size):
            chunk = slice(first, min(first + size, len(h_NH)))
            z_CD = (h_NH[chunk] @ w_DH.T).requires_grad_()
            with torch.enable_grad():
                loss = loss_of(z_CD, chunk)
            (z_grad_CD,) = torch.autograd.grad(loss, z_CD)
            total += loss.detach()
            h_grad_NH[chunk] = z_grad_CD @ w_DH
            w_grad_DH += z_grad_CD.flatten(0, -2).T @ h_NH[chunk].flatten(0, -2)
        context.save_for_backward(h_grad_NH, w_grad_DH)
        return total

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        h_grad_NH, w_grad_DH = context.saved_tensors
        return gradient * h_grad_NH, gradient * w_grad_DH, None, None
