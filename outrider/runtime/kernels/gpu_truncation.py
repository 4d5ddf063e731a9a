"""Truncation of distributions on a GPU, in Triton, without ranking all tokens.

A program truncates one distribution. What ranks decide are edges: the k-th largest probability, and
the smallest one in the nucleus. Probabilities are ordered as their bits are, so that a search over
these finds an edge in sixteen passes over the distribution, whatever its size; each pass compares
with four bounds at once. Ranking takes about thirty kernels of torch.

Legend: B rows, M positions, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.kernels.gpu_kernels import on_device_of
from outrider.sampling.truncate import Truncation

_MOST_AT_ONCE = 1024

_HIGHEST = tl.constexpr(0x40000000)
"""The bits of 2.0, which no probability exceeds."""


def truncated(p_BMV: Tensor, by: Truncation) -> Tensor:
    """``sampling.truncate.Truncate`` for distributions in float32 on a GPU."""
    p_BMV = p_BMV.contiguous()
    found_BMV = torch.empty_like(p_BMV)
    B, M, V = p_BMV.shape
    block = min(_MOST_AT_ONCE, triton.next_power_of_2(V))
    given = (p_BMV, found_BMV, *by, M, V)
    if p_BMV.numel():
        with on_device_of(p_BMV):
            _truncate[(B * M,)](*given, BLOCK=block, num_warps=max(1, block // 128))
    return found_BMV


@triton.jit(do_not_specialize=["M", "V"])
def _truncate(p, found, top_k, top_p, strict, min_p, M, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    b = row // M
    p += row.to(tl.int64) * V
    found += row.to(tl.int64) * V
    k, mass, fraction = tl.load(top_k + b), tl.load(top_p + b), tl.load(min_p + b)
    if ((k <= 0) | (k >= V)) & (mass >= 1) & (fraction <= 0):
        _copy(p, found, V, BLOCK)
    else:
        is_strict = tl.load(strict + b) != 0
        kth = tl.cast(0, tl.int32)
        if (k > 0) & (k < V):
            kth = _edge(p, V, kth, k.to(tl.float32), False, True, BLOCK)
        edge, num_ties = kth, tl.cast(V, tl.int32)
        if mass < 1:
            mass *= _sum_above(p, V, kth - 1, BLOCK)
            edge = tl.maximum(kth, _edge(p, V, kth, mass, is_strict, False, BLOCK))
            num_ties = _num_ties(mass - _sum_above(p, V, edge, BLOCK), edge, is_strict, V)
        lowest = fraction * _greatest(p, V, BLOCK)
        _keep(p, found, V, edge, num_ties, lowest, BLOCK)


@triton.jit
def _copy(p, found, V, BLOCK: tl.constexpr):
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        tl.store(found + token, tl.load(p + token, token < V, 0.0), token < V)


@triton.jit
def _edge(p, V, kth, limit, is_strict, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest bits above which the tokens from ``kth`` on have less than the limit, or with
    ``is_strict`` no more: their mass, or with ``COUNTS`` their number. A token of these bits is the
    last that is kept."""
    low, high = tl.cast(-1, tl.int32), tl.cast(_HIGHEST, tl.int32)
    while high - low > 1:
        step = (high - low + 3) // 4
        bounds = tl.minimum(low + step * (tl.arange(0, 4) + 1), high)
        sums = tl.zeros([BLOCK, 4], tl.float32)
        for first in range(0, V, BLOCK):
            token = first + tl.arange(0, BLOCK)
            probability = tl.load(p + token, token < V, 0.0)
            bits = probability.to(tl.int32, bitcast=True)
            above = (bits[:, None] > bounds[None, :]) & (bits >= kth)[:, None]
            if COUNTS:
                sums += above.to(tl.float32)
            else:
                sums += tl.where(above, probability[:, None], 0.0)
        found = tl.sum(sums, 0)
        within = (found < limit) | (is_strict & (found == limit)) | (found == 0)
        num_beyond = 4 - tl.sum(within.to(tl.int32), 0)
        high = tl.minimum(low + step * (num_beyond + 1), high)
        low += step * num_beyond
    return high


@triton.jit
def _sum_above(p, V, bound, BLOCK: tl.constexpr):
    """The mass of the tokens above these bits."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        probability = tl.load(p + token, token < V, 0.0)
        sums += tl.where(probability.to(tl.int32, bitcast=True) > bound, probability, 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _greatest(p, V, BLOCK: tl.constexpr):
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(p + token, token < V, 0.0))
    return tl.max(most, 0)


@triton.jit
def _num_ties(left, edge, is_strict, V):
    """How many of the equal tokens at the edge of the nucleus are in it, the first of which always
    is: those before which less than ``left`` of their mass lies, or with ``is_strict`` no more."""
    num = left / edge.to(tl.float32, bitcast=True)
    num = tl.where(is_strict, tl.floor(num) + 1, tl.ceil(num))
    return tl.where(num < V, tl.maximum(num, 1), V).to(tl.int32)  # the edge may be 0


@triton.jit
def _keep(p, found, V, edge, num_ties, lowest, BLOCK: tl.constexpr):
    """Writes the tokens that are kept, over their mass, and 0 for the others."""
    sums = tl.zeros([BLOCK], tl.float32)
    num_before = tl.cast(0, tl.int32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        kept, num_before = _kept(p, token, V, edge, num_ties, lowest, num_before)
        sums += kept
    total = tl.sum(sums, 0)
    num_before = tl.cast(0, tl.int32)
    for first in range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        kept, num_before = _kept(p, token, V, edge, num_ties, lowest, num_before)
        tl.store(found + token, kept / total, token < V)


@triton.jit
def _kept(p, token, V, edge, num_ties, lowest, num_before):
    """The probabilities of some tokens, 0 for those that are not kept; and how many of the equal
    tokens at the edge were seen so far."""
    probability = tl.load(p + token, token < V, 0.0)
    bits = probability.to(tl.int32, bitcast=True)
    is_tie = ((bits == edge) & (token < V)).to(tl.int32)
    rank = num_before + tl.cumsum(is_tie, 0) - is_tie
    outside = (bits < edge) | ((is_tie != 0) & (rank >= num_ties)) | (probability < lowest)
    return tl.where(outside, 0.0, probability), num_before + tl.sum(is_tie, 0)
