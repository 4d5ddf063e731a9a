"""Inverse-CDF sampling with given uniform numbers.

Legend: B rows, V vocabulary, G blocks of consecutive tokens, W tokens of a block.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK_SIZE = 256
_LARGE = 32 * _BLOCK_SIZE  # a smaller vocabulary takes less time in one cumulative sum


def draw(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """Index v with probability proportional to ``weights[b, v]``, shape (B,).

    Weights are non-negative and need not be normalised; a token of weight zero is never drawn.
    Cumulative sums are in float64 where the device supports it. A large vocabulary is searched in
    two levels, first over the sums of blocks and then within one block, which reads the weights
    once instead of computing the cumulative sum of all of them.
    """
    if weights_BV.shape[1] < _LARGE:
        return _within(weights_BV, u_B)
    return _in_block(weights_BV, _block_sums(weights_BV), u_B).token_B


def draw_distinct(weights_BV: Tensor, u_Bk: Tensor) -> tuple[Tensor, Tensor]:
    """Draws k indices without replacement: each as :func:`draw` does, from the weights without the
    indices drawn before. Returns the indices and their weights, each (B, k); the weight is 0 where
    nothing was left to draw.

    In a large vocabulary a draw changes the sum of one block, and only this sum is computed again.
    (Subtracting the weight from the sum would leave rounding errors where a token has nearly all
    the mass.)
    """
    draw_all = _distinct if weights_BV.shape[1] < _LARGE else _distinct_by_blocks
    drawn, weights = zip(*draw_all(weights_BV, u_Bk.unbind(1)), strict=True)
    return torch.stack(drawn, 1), torch.stack(weights, 1)


def _distinct(weights_BV: Tensor, numbers: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The indices and weights of :func:`draw_distinct`, each (B,), by cumulative sums over all
    weights."""
    token_B: Tensor | None = None
    for u_B in numbers:
        if token_B is not None:
            weights_BV = weights_BV.scatter(1, token_B[:, None], 0.0)
        token_B = _within(weights_BV, u_B)
        yield token_B, weights_BV.gather(1, token_B[:, None])[:, 0]


def _distinct_by_blocks(
    weights_BV: Tensor, numbers: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same in two levels."""
    sums_BG, drawn = _block_sums(weights_BV), list[Tensor]()
    for u_B in numbers:
        token_B, block_B1, index_B1, left_BW = _in_block(weights_BV, sums_BG, u_B, drawn)
        yield token_B, left_BW.gather(1, index_B1)[:, 0]
        drawn.append(token_B)
        left_B1 = left_BW.scatter(1, index_B1, 0.0).sum(1, keepdim=True)
        sums_BG = sums_BG.scatter(1, block_B1, left_B1)


def _block_sums(weights_BV: Tensor) -> Tensor:
    """The sum of each block of a large vocabulary, (B, G). It has the precision of the weights."""
    B, V = weights_BV.shape
    whole = V - V % _BLOCK_SIZE
    sums_BG = weights_BV[:, :whole].reshape(B, -1, _BLOCK_SIZE).sum(-1)
    if whole == V:
        return sums_BG
    return torch.cat([sums_BG, weights_BV[:, whole:].sum(-1, keepdim=True)], 1)


class _InBlock(NamedTuple):
    """An index, (B,); its block and its index within the block, (B, 1); and the weights of the
    block, (B, W)."""

    token_B: Tensor
    block_B1: Tensor
    index_B1: Tensor
    weights_BW: Tensor


def _in_block(
    weights_BV: Tensor, sums_BG: Tensor, u_B: Tensor, without: Sequence[Tensor] = ()
) -> _InBlock:
    """:func:`draw` in two levels.

    Args:
        weights_BV: as of :func:`draw`.
        sums_BG: of the blocks, without the indices that are left out.
        u_B: as of :func:`draw`.
        without: indices that are left out, each (B,).
    """
    V = weights_BV.shape[1]
    cdf_BG = sums_BG.cumsum(-1, dtype=_wide(weights_BV))
    threshold_B1 = u_B.to(cdf_BG.dtype)[:, None] * cdf_BG[:, -1:]
    block_B1 = torch.searchsorted(cdf_BG, threshold_B1, right=True).clamp_(max=cdf_BG.shape[1] - 1)
    above_B1 = cdf_BG.gather(1, block_B1)
    below_B1 = torch.where(block_B1 > 0, cdf_BG.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    u_B1 = (threshold_B1 - below_B1) / (above_B1 - below_B1)
    token_BW = block_B1 * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=block_B1.device)
    out_BW = token_BW >= V
    for x_B in without:
        out_BW = out_BW | (token_BW == x_B[:, None])
    weights_BW = weights_BV.gather(1, token_BW.clamp(max=V - 1)).masked_fill_(out_BW, 0.0)
    index_B = _within(weights_BW, u_B1[:, 0].clamp(max=1 - torch.finfo(u_B1.dtype).eps))
    token_B = (block_B1[:, 0] * _BLOCK_SIZE + index_B).clamp_(max=V - 1)
    return _InBlock(token_B, block_B1, index_B[:, None], weights_BW)


def _within(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """:func:`draw` by one cumulative sum over all weights."""
    cdf_BV = weights_BV.cumsum(-1, dtype=_wide(weights_BV))
    if u_B.dtype != cdf_BV.dtype:
        u_B = u_B.to(cdf_BV.dtype)
    index_B1 = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)
    return index_B1[:, 0].clamp_(max=weights_BV.shape[-1] - 1)


def _wide(weights_BV: Tensor) -> torch.dtype:
    return torch.float32 if weights_BV.device.type == "mps" else torch.float64
