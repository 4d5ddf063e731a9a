"""Reductions over the last dimension that torch computes slowly, or does not compile.

Legend: V numbers of the last dimension.
"""

import torch
from torch import Tensor

from outrider.core.recording import is_recorded

_BLOCK_SIZE = 512
_LARGE = 8 * _BLOCK_SIZE  # fewer numbers take less time at once
_MAX_NUMPY_SIZE = 1 << 22


def argmax(x: Tensor) -> Tensor:
    """``x.argmax(-1)``, the first of equal values, of a tensor with two dimensions or more.

    On a CPU, torch compares number by number, in programs too. Small tensors go through numpy where
    it knows their format; otherwise only the numbers of one block are compared in this way.
    """
    if x.device.type != "cpu":
        return x.argmax(-1)
    if not is_recorded() and _is_for_numpy(x):
        return torch.from_numpy(x.numpy().argmax(-1))
    return _argmax_in_blocks(x) if x.shape[-1] >= _LARGE else x.argmax(-1)


def _is_for_numpy(x: Tensor) -> bool:
    known = x.dtype in (torch.float32, torch.float64) and not x.requires_grad
    return known and x.numel() <= _MAX_NUMPY_SIZE


def any_of(x: Tensor) -> Tensor:
    """``x.any(-1)`` of truth values. torch 2.13 emits C++ that does not compile for ``any`` and
    ``max`` of truth values where vectors do not divide their number."""
    return x.sum(-1) > 0


def _argmax_in_blocks(x: Tensor) -> Tensor:
    """The largest numbers of all blocks are found by vector instructions; then the first block that
    has the largest one is searched."""
    V = x.shape[-1]
    whole = V - V % _BLOCK_SIZE
    blocks = x[..., :whole].reshape(*x.shape[:-1], -1, _BLOCK_SIZE)
    largest = blocks.amax(-1)
    if whole < V:
        largest = torch.cat([largest, x[..., whole:].amax(-1, keepdim=True)], -1)
    first = _BLOCK_SIZE * largest.argmax(-1, keepdim=True)
    index = (first + torch.arange(_BLOCK_SIZE)).clamp(max=V - 1)
    return first[..., 0] + x.gather(-1, index).argmax(-1)
