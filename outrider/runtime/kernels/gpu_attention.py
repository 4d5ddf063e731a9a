"""Attention of few query tokens on a GPU, in Triton: keys and values stay where they are, and heads
of queries that share them read them once.

Consumer GPUs have some 99 KiB of shared memory per block, data centres' twice as much. The sizes
below fit the former.

Legend: B rows, N query tokens, Q heads of queries, K heads of keys, C width of a head, S slots that
are read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.kernels.gpu_kernels import on_device_of

_QUERY_BYTES = 2**15
_STEP_BYTES = 2**14

_BLOCKS = 192
"""Blocks that keep a GPU busy: one or two per multiprocessor."""


def most_queries(width: int, dtype: torch.dtype) -> int:
    """Most queries per head of keys, query tokens times heads that share it, for heads of so many
    numbers: a block holds all of them in shared memory."""
    return min(64, _QUERY_BYTES // (triton.next_power_of_2(width) * dtype.itemsize))


def slots_per_step(width: int, dtype: torch.dtype) -> int:
    """Slots whose keys and values a step reads, 16 to 64: a block holds those of two steps."""
    return max(16, min(64, _STEP_BYTES // (triton.next_power_of_2(width) * dtype.itemsize)))


def attends(q_BQNC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask_B1NS: Tensor) -> bool:
    """Whether :func:`attended` takes these: few queries, values as wide as keys, all of a dtype
    that it reads, and a mask that is added."""
    num = q_BQNC.shape[2] * (q_BQNC.shape[1] // k_BKSC.shape[1])
    few = num <= most_queries(q_BQNC.shape[3], q_BQNC.dtype)
    alike = q_BQNC.shape[3] == k_BKSC.shape[3] == v_BKSC.shape[3]
    dtypes = {q_BQNC.dtype, k_BKSC.dtype, v_BKSC.dtype, mask_B1NS.dtype}
    floats = (torch.bfloat16, torch.float16, torch.float32)
    return few and alike and len(dtypes) == 1 and q_BQNC.dtype in floats


def attended(
    q_BQNC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask_B1NS: Tensor, scale: float
) -> Tensor:
    """Attention of few query tokens to keys and values that stay where they are: ``Q // K`` heads
    of queries share a head of keys.

        softmax(scale · q kᵀ + mask) v

    A block computes the queries of a row that share a head of keys. Long rows are divided among
    several blocks, whose results a second kernel joins (Dao et al., 2023, "Flash-Decoding").

    Returns:
        (B, N, Q, C), contiguous.
    """
    B, Q, N, C = q_BQNC.shape
    K, S = k_BKSC.shape[1:3]
    slots = slots_per_step(C, q_BQNC.dtype)
    num = min(triton.cdiv(S, 64), max(1, _BLOCKS // (B * K)))
    share = triton.cdiv(triton.cdiv(S, num), slots) * slots
    num = triton.cdiv(S, share)
    found = q_BQNC.new_empty(B, N, Q, C)
    parts, extents = found, found
    if num > 1:
        parts = q_BQNC.new_empty(num, B, N, Q, C, dtype=torch.float32)
        extents = q_BQNC.new_empty(num, B, N, Q, 2, dtype=torch.float32)
    group = Q // K
    with on_device_of(q_BQNC):
        _attend[(B * K, num)](
            q_BQNC,
            k_BKSC,
            v_BKSC,
            mask_B1NS,
            parts,
            extents,
            *q_BQNC.stride()[:3],
            *k_BKSC.stride()[:3],
            *v_BKSC.stride()[:3],
            mask_B1NS.stride(0) if mask_B1NS.shape[0] > 1 else 0,
            mask_B1NS.stride(2) if mask_B1NS.shape[2] > 1 else 0,
            scale,
            B,
            K,
            N,
            S,
            share,
            C=C,
            GROUP=group,
            QUERIES=max(16, triton.next_power_of_2(N * group)),
            SLOTS=slots,
            WIDTH=max(16, triton.next_power_of_2(C)),
            DIVIDED=num > 1,
            num_warps=4,
            num_stages=2,
        )
        if num > 1:
            _join[(B * N * Q,)](
                parts,
                extents,
                found,
                num,
                C=C,
                SHARES=triton.next_power_of_2(num),
                WIDTH=triton.next_power_of_2(C),
            )
    return found


@triton.jit(do_not_specialize=["B", "K", "N", "S", "share"])
def _attend(
    q,
    k,
    v,
    mask,
    parts,
    extents,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    mask_row,
    mask_token,
    scale,
    B,
    K,
    N,
    S,
    share,
    C: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    row, kv_head = (tl.program_id(0) // K).to(tl.int64), tl.program_id(0) % K
    part = tl.program_id(1)
    query, channel = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    token, head = query // GROUP, kv_head * GROUP + query % GROUP
    is_query, is_channel = token < N, channel < C
    q += row * q_row + head[:, None] * q_head + token[:, None] * q_token + channel
    queries = tl.load(q, is_query[:, None] & is_channel, 0.0)
    k += row * k_row + kv_head * k_head
    v += row * v_row + kv_head * v_head
    mask += row * mask_row + token[:, None] * mask_token
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    begin = part * share
    for first in range(begin, tl.minimum(begin + share, S), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        is_slot = slot < S
        inside = is_slot[:, None] & is_channel
        keys = tl.load(k + slot[:, None].to(tl.int64) * k_slot + channel, inside, 0.0)
        values = tl.load(v + slot[:, None].to(tl.int64) * v_slot + channel, inside, 0.0)
        hidden = tl.load(mask + slot, is_query[:, None] & is_slot, 0.0).to(tl.float32)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale + hidden
        scores = tl.where(is_slot, scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrunk = tl.exp(largest - top)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None]
        sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        largest = top
    place = (row * N + token) * (K * GROUP) + head
    inside = is_query[:, None] & is_channel
    if DIVIDED:
        place += part.to(tl.int64) * B * N * K * GROUP
        tl.store(parts + place[:, None] * C + channel, sums, inside)
        tl.store(extents + 2 * place, largest, is_query)
        tl.store(extents + 2 * place + 1, total, is_query)
    else:
        tl.store(parts + place[:, None] * C + channel, sums / total[:, None], inside)


@triton.jit(do_not_specialize=["num"])
def _join(parts, extents, found, num, C: tl.constexpr, SHARES: tl.constexpr, WIDTH: tl.constexpr):
    place, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    part, channel = tl.arange(0, SHARES), tl.arange(0, WIDTH)
    is_part, is_channel = part < num, channel < C
    each = part.to(tl.int64) * count + place
    largest = tl.load(extents + 2 * each, is_part, float("-inf"))
    total = tl.load(extents + 2 * each + 1, is_part, 0.0)
    weight = tl.exp(largest - tl.max(largest, 0))
    sums = tl.load(parts + each[:, None] * C + channel, is_part[:, None] & is_channel, 0.0)
    joined = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(found + place * C + channel, joined, is_channel)
