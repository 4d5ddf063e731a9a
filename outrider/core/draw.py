"""Inverse-CDF sampling with given uniform numbers, and a fast ``argmax``.

Legend: B rows, V vocabulary, G blocks of consecutive tokens, W tokens of a block.
"""

import torch
from torch import Tensor

_BLOCK_SIZE = 256
_MAX_NUMPY_SIZE = 1 << 22
_LARGE = 32 * _BLOCK_SIZE  # a smaller vocabulary takes less time in one cumulative sum


def argmax(x: Tensor) -> Tensor:
    """``x.argmax(-1)``, the first of equal values, of a tensor with two dimensions or more.

    On a CPU, small tensors go through numpy, which takes a fifth of torch's time on one core; large
    ones stay with torch, which uses several cores.
    """
    if torch.compiler.is_compiling():
        return x.argmax(-1)
    small = x.device.type == "cpu" and x.numel() <= _MAX_NUMPY_SIZE and not x.requires_grad
    if small and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def draw(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """Index v with probability proportional to ``weights[b, v]``, shape (B,).

    Weights are non-negative and need not be normalised; a token of weight zero is never drawn.
    Cumulative sums are in float64 where the device supports it. A large vocabulary is searched in
    two levels, first over the sums of blocks and then within one block, which reads the weights
    once instead of computing the cumulative sum of all of them. (The sum of a block itself has the
    precision of the weights.)
    """
    V = weights_BV.shape[1]
    if V < _LARGE:
        return _within(weights_BV, u_B)
    whole = V - V % _BLOCK_SIZE
    sums_BG = weights_BV[:, :whole].reshape(weights_BV.shape[0], -1, _BLOCK_SIZE).sum(-1)
    if whole < V:
        sums_BG = torch.cat([sums_BG, weights_BV[:, whole:].sum(-1, keepdim=True)], 1)
    cdf_BG = sums_BG.cumsum(-1, dtype=_wide(weights_BV))
    threshold_B1 = u_B.to(cdf_BG.dtype)[:, None] * cdf_BG[:, -1:]
    block_B1 = torch.searchsorted(cdf_BG, threshold_B1, right=True).clamp_(max=cdf_BG.shape[1] - 1)
    above_B1 = cdf_BG.gather(1, block_B1)
    below_B1 = torch.where(block_B1 > 0, cdf_BG.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    u_B1 = (threshold_B1 - below_B1) / (above_B1 - below_B1)
    token_BW = block_B1 * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=block_B1.device)
    weights_BW = weights_BV.gather(1, token_BW.clamp(max=V - 1)).masked_fill_(token_BW >= V, 0.0)
    index_B = _within(weights_BW, u_B1[:, 0].clamp(max=1 - torch.finfo(u_B1.dtype).eps))
    return (block_B1[:, 0] * _BLOCK_SIZE + index_B).clamp_(max=V - 1)


def _within(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """:func:`draw` by one cumulative sum over all weights."""
    cdf_BV = weights_BV.cumsum(-1, dtype=_wide(weights_BV))
    if u_B.dtype != cdf_BV.dtype:
        u_B = u_B.to(cdf_BV.dtype)
    index_B1 = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)
    return index_B1[:, 0].clamp_(max=weights_BV.shape[-1] - 1)


def _wide(weights_BV: Tensor) -> torch.dtype:
    return torch.float32 if weights_BV.device.type == "mps" else torch.float64
