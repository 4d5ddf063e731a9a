"""Kernels for GPUs, in Triton: norms, rotary embedding and activations, which a decoder layer
computes between its matrix products and attention (``gpu_attention.py``).

Each takes the place of two to ten kernels of torch. They compute in float32 and round their results
once, where torch's round each intermediate result. Triton comes with torch's CUDA builds; without
it this module cannot be imported.

Legend: B rows, N query tokens, H heads, Q of queries, K of keys, C width of a head, F width of an
MLP.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def on_device_of(x: Tensor) -> Any:
    """Kernels start on the current device, which may be another one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
