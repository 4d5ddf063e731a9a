"""Inverse-CDF sampling from uniform numbers that somebody else drew; and the most probable token.

Legend: B rows, V vocabulary, G blocks, S tokens of a block.
"""

import torch
from torch import Tensor

_S = 256
_MOST_NUMBERS = 1 << 22
_LARGE = 32 * _S  # below that, one long running sum takes less time than many short steps


def best(x: Tensor) -> Tensor:
    """``x.argmax(-1)``, the first of equals, of a tensor of two dimensions or more. On a CPU by
    numpy, which takes a fifth of torch's time on one core, unless there is enough for many."""
    if torch.compiler.is_compiling():
        return x.argmax(-1)
    small = x.device.type == "cpu" and x.numel() <= _MOST_NUMBERS and not x.requires_grad
    if small and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(x.numpy().argmax(-1))
    return x.argmax(-1)


def draw(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """Index v with probability proportional to ``weights[b, v]``, shape (B,).

    Weights are non-negative and need no normalisation; a token of weight zero is never drawn.
    Running sums are in float64 where the device has it. Over a large vocabulary they run over
    blocks, and then within the one block that was hit: one reading of the weights instead of a
    running sum of them all. (A block's own sum is of the weights' precision.)
    """
    V = weights_BV.shape[1]
    if V < _LARGE:
        return _within(weights_BV, u_B)
    whole = V - V % _S
    sums_BG = weights_BV[:, :whole].reshape(weights_BV.shape[0], -1, _S).sum(-1)
    if whole < V:
        sums_BG = torch.cat([sums_BG, weights_BV[:, whole:].sum(-1, keepdim=True)], 1)
    cdf_BG = sums_BG.cumsum(-1, dtype=_wide(weights_BV))
    threshold_B1 = u_B.to(cdf_BG.dtype)[:, None] * cdf_BG[:, -1:]
    block_B1 = torch.searchsorted(cdf_BG, threshold_B1, right=True).clamp_(max=cdf_BG.shape[1] - 1)
    above_B1 = cdf_BG.gather(1, block_B1)
    below_B1 = torch.where(block_B1 > 0, cdf_BG.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    u_BS = (threshold_B1 - below_B1) / (above_B1 - below_B1)
    token_BS = block_B1 * _S + torch.arange(_S, device=block_B1.device)
    hit_BS = weights_BV.gather(1, token_BS.clamp(max=V - 1)).masked_fill_(token_BS >= V, 0.0)
    index_B = _within(hit_BS, u_BS[:, 0].clamp(max=1 - torch.finfo(u_BS.dtype).eps))
    return (block_B1[:, 0] * _S + index_B).clamp_(max=V - 1)


def _within(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    cdf_BV = weights_BV.cumsum(-1, dtype=_wide(weights_BV))
    if u_B.dtype != cdf_BV.dtype:
        u_B = u_B.to(cdf_BV.dtype)
    index_B1 = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)
    return index_B1[:, 0].clamp_(max=weights_BV.shape[-1] - 1)


def _wide(weights_BV: Tensor) -> torch.dtype:
    return torch.float32 if weights_BV.device.type == "mps" else torch.float64
