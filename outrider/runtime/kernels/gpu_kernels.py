"""Kernels for GPUs, in Triton: what a decoder layer computes between its matrix products.

Each takes the place of two to ten kernels of torch. They compute in float32 and round their results
once, where torch's rounds each intermediate result. Triton comes with torch's CUDA builds; without
it this module cannot be imported.

Legend: B rows, N query tokens, H heads, Q of queries, K of keys, C width of a head, S slots that
are read, F width of an MLP.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_NARROW = 64
"""Most queries per head of keys: query tokens times heads that share it."""

_SLOTS = 64
"""Slots that a step of attention reads."""

_BLOCKS = 192
"""Blocks that keep a GPU busy: one or two per multiprocessor."""

_COLUMNS = 1024


ADDED = (0.0, 1.0)
"""What the weights of norms may be added to."""


def normed(x: Tensor, weight: Tensor, epsilon: float, added: float) -> Tensor:
    """RMS norm over the last dimension: ``x / √(mean(x²) + ε) · (a + w)``.

    Args:
        x: (..., H).
        weight: (H,).
        epsilon: as above.
        added: a.
    """
    x = x.contiguous()
    found = torch.empty_like(x)
    _start_norm(x, x, weight, found, found, epsilon, added, adds=False)
    return found


def normed_sum(
    x: Tensor, y: Tensor, weight: Tensor, epsilon: float, added: float
) -> tuple[Tensor, Tensor]:
    """``x + y``, both (..., H), and its RMS norm; otherwise as :func:`normed`."""
    x, y = x.contiguous(), y.contiguous()
    total, found = torch.empty_like(x), torch.empty_like(x)
    _start_norm(x, y, weight, total, found, epsilon, added, adds=True)
    return total, found


def _start_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    total: Tensor,
    found: Tensor,
    epsilon: float,
    added: float,
    *,
    adds: bool,
) -> None:
    H = x.shape[-1]
    width = triton.next_power_of_2(H)
    sizes = {"H": H, "WIDTH": width, "ADDS": adds, "num_warps": min(16, max(1, width // 256))}
    with on_device_of(x):
        _norm[(x.numel() // H,)](x, y, weight, total, found, epsilon, added, **sizes)


@triton.jit
def _norm(
    x,
    y,
    weight,
    total,
    found,
    epsilon,
    added,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, WIDTH)
    here = column < H
    w = added + tl.load(weight + column, here, 0.0).to(tl.float32)
    row = tl.load(x + start + column, here, 0.0).to(tl.float32)
    if ADDS:
        row += tl.load(y + start + column, here, 0.0).to(tl.float32)
        row = row.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + start + column, row, here)
    scale = tl.rsqrt(tl.sum(row * row) / H + epsilon)
    tl.store(found + start + column, row * scale * w, here)


class HeadNorms(NamedTuple):
    """RMS norms of queries and of keys, over the width of a head.

    Attributes:
        q_weight, k_weight: (C,) each.
        epsilon, added: of both, as of :func:`normed`.
    """

    q_weight: Tensor
    k_weight: Tensor
    epsilon: float
    added: float


class Place(NamedTuple):
    """Where keys and values are written.

    Attributes:
        keys, values: KV buffers (B or more rows, K, slots, C).
        slots_BN: the slot of each token.
    """

    keys: Tensor
    values: Tensor
    slots_BN: Tensor


def rotated(
    qkv_BNHC: Tensor,
    num_queries: int,
    cos_BNC: Tensor,
    sin_BNC: Tensor,
    place: Place,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Queries after rotary embedding, halves of a head turned against each other; keys after it,
    and values, are written to KV buffers.

        y = x · cos + (-x₂, x₁) · sin

    Args:
        qkv_BNHC: heads of queries, of keys and of values; contiguous.
        num_queries: how many of the heads are of queries.
        cos_BNC, sin_BNC: of the angles; of one row for all, or of each.
        place: of keys and values.
        norms: applied to queries and keys before, if any.

    Returns:
        (B, N, Q, C), contiguous.
    """
    B, N, H, C = qkv_BNHC.shape
    found = qkv_BNHC.new_empty(B, N, num_queries, C)
    q_weight, k_weight, epsilon, added = norms or (qkv_BNHC, qkv_BNHC, 0.0, 0.0)
    keys, values, slots_BN = place
    with on_device_of(qkv_BNHC):
        _rotate[(B * N, H)](
            qkv_BNHC,
            cos_BNC,
            sin_BNC,
            q_weight,
            k_weight,
            found,
            keys,
            values,
            slots_BN,
            cos_BNC.stride(0) if cos_BNC.shape[0] > 1 else 0,
            *slots_BN.stride(),
            *keys.stride()[:3],
            *values.stride()[:3],
            N,
            num_queries,
            epsilon,
            added,
            C=C,
            HALF=triton.next_power_of_2(C // 2),
            NORM=norms is not None,
            num_warps=1,
        )
    return found


@triton.jit(do_not_specialize=["N", "num_queries"])
def _rotate(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    found,
    keys,
    values,
    slots,
    cos_row,
    slots_row,
    slots_token,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    N,
    num_queries,
    epsilon,
    added,
    C: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    place, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row, token = place // N, place % N
    num_keys = (num_heads - num_queries) // 2
    first = tl.arange(0, HALF)
    here = first < C // 2
    second = first + C // 2
    qkv += (place * num_heads + head) * C
    x1, x2 = tl.load(qkv + first, here, 0.0), tl.load(qkv + second, here, 0.0)
    slot = tl.load(slots + row * slots_row + token * slots_token).to(tl.int64)
    if head >= num_queries + num_keys:
        values += row * v_row + (head - num_queries - num_keys) * v_head + slot * v_slot
        tl.store(values + first, x1, here)
        tl.store(values + second, x2, here)
    else:
        x1f, x2f = x1.to(tl.float32), x2.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(x1f * x1f) + tl.sum(x2f * x2f)) / C + epsilon)
            weight = q_weight
            if head >= num_queries:
                weight = k_weight
            x1f *= scale * (added + tl.load(weight + first, here, 0.0).to(tl.float32))
            x2f *= scale * (added + tl.load(weight + second, here, 0.0).to(tl.float32))
        angle = row * cos_row + token * C
        cos1 = tl.load(cos + angle + first, here, 0.0).to(tl.float32)
        cos2 = tl.load(cos + angle + second, here, 0.0).to(tl.float32)
        sin1 = tl.load(sin + angle + first, here, 0.0).to(tl.float32)
        sin2 = tl.load(sin + angle + second, here, 0.0).to(tl.float32)
        y1, y2 = x1f * cos1 - x2f * sin1, x2f * cos2 + x1f * sin2
        if head < num_queries:
            found += (place * num_queries + head) * C
            tl.store(found + first, y1, here)
            tl.store(found + second, y2, here)
        else:
            keys += row * k_row + (head - num_queries) * k_head + slot * k_slot
            tl.store(keys + first, y1, here)
            tl.store(keys + second, y2, here)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) · up``.

    Args:
        gate_up: (..., 2F): gates, then what they multiply; contiguous.
        activation: ``silu``, or ``gelu_tanh``.

    Returns:
        (..., F).
    """
    F = gate_up.shape[-1] // 2
    found = gate_up.new_empty(*gate_up.shape[:-1], F)
    with on_device_of(gate_up):
        _gate[(found.numel() // F, triton.cdiv(F, _COLUMNS))](
            gate_up, found, F, COLUMNS=_COLUMNS, SILU=activation == "silu"
        )
    return found


@triton.jit
def _gate(gate_up, found, F, COLUMNS: tl.constexpr, SILU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < F
    gate = tl.load(gate_up + token * 2 * F + column, here, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + column, here, 0.0).to(tl.float32)
    if SILU:
        gate *= tl.sigmoid(gate)
    else:
        cubic = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate *= tl.sigmoid(2 * cubic)  # (1 + tanh x) / 2
    tl.store(found + token * F + column, gate * up, here)


def attends(q_BQNC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, mask_B1NS: Tensor) -> bool:
    """Whether :func:`attended` takes these: few queries, values as wide as keys, all of a dtype
    that it reads, and a mask that is added."""
    few = q_BQNC.shape[2] * (q_BQNC.shape[1] // k_BKSC.shape[1]) <= _NARROW
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
    num = min(triton.cdiv(S, _SLOTS), max(1, _BLOCKS // (B * K)))
    share = triton.cdiv(triton.cdiv(S, num), _SLOTS) * _SLOTS
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
            SLOTS=_SLOTS,
            WIDTH=max(16, triton.next_power_of_2(C)),
            DIVIDED=num > 1,
            num_warps=4,
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


def on_device_of(x: Tensor) -> Any:
    """Kernels start on the current device, which may be another one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
