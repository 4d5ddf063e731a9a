"""Products with weights of few bits on a GPU, in Triton (``grouped.py`` says what the weights are).

A product over a few tokens takes as long as its weights are read: those of four bits, read as they
are, take a third of the time of bfloat16.

Legend: M tokens, K inputs, N outputs, G groups of inputs, P bytes of a group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.kernels.gpu_kernels import on_device_of

_OUTPUTS = 64
_INPUTS = 128
"""Inputs that a step of a product reads."""

_BLOCKS = 1056
"""Blocks of a product that keep a GPU busy: eight per multiprocessor."""


_STAGES = 4
_COLUMNS = 1024


def few_bits_product(
    x: Tensor,
    weight_GNP: Tensor,
    scale_GN: Tensor,
    offset_GN: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x Wᵀ + b`` for weights ``w = s q + m`` (``grouped.py``).

    Integers are multiplied as they are, since all of them are numbers of x's dtype, and a group's
    sum is scaled in float32. Where there are few outputs, the groups are divided among several
    blocks, whose sums a second kernel adds.

    Args:
        x: (..., K).
        weight_GNP: q; int8, or uint8 with two of four bits in a byte: the first half of a group in
            the low ones.
        scale_GN: s.
        offset_GN: m; none where all are 0.
        bias: (N,), if any.

    Returns:
        (..., N), in the dtype of x.
    """
    G, N, P = weight_GNP.shape
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    M, bits = x_MK.shape[0], 8 if weight_GNP.dtype == torch.int8 else 4
    found_MN = x.new_empty(M, N)
    if not M:
        return found_MN.view(*x.shape[:-1], N)
    tokens = 16 if M <= 16 else 32 if M <= 32 else 64
    blocks = triton.cdiv(N, _OUTPUTS) * triton.cdiv(M, tokens)
    group = P * 8 // bits
    groups = max(1, _INPUTS // group)
    steps = triton.cdiv(G, groups)
    num = max(1, min(steps, _BLOCKS // blocks))
    share = triton.cdiv(steps, num) * groups
    num = triton.cdiv(G, share)
    parts = x.new_empty(num, M, N, dtype=torch.float32) if num > 1 else found_MN
    with on_device_of(x):
        _multiply[(triton.cdiv(N, _OUTPUTS), triton.cdiv(M, tokens), num)](
            x_MK,
            weight_GNP,
            scale_GN,
            scale_GN if offset_GN is None else offset_GN,
            x_MK if bias is None else bias,
            parts,
            weight_GNP.stride(0),
            scale_GN.stride(0),
            M,
            N,
            G,
            share,
            GROUP=group,
            BITS=bits,
            OFFSETS=offset_GN is not None,
            BIAS=bias is not None and num == 1,
            TOKENS=tokens,
            OUTPUTS=_OUTPUTS,
            GROUPS=groups,
            num_warps=4,
            num_stages=_STAGES,
        )
        if num > 1:
            _add_parts[(M, triton.cdiv(N, _COLUMNS))](
                parts,
                x_MK if bias is None else bias,
                found_MN,
                M,
                N,
                num,
                BIAS=bias is not None,
                COLUMNS=_COLUMNS,
            )
    return found_MN.view(*x.shape[:-1], N)


@triton.jit(do_not_specialize=["M", "G", "share"])
def _multiply(
    x,
    weight,
    scale,
    offset,
    bias,
    parts,
    weight_group,
    scale_group,
    M,
    N,
    G,
    share,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    is_output, is_token = output < N, token < M
    HALF: tl.constexpr = GROUP // 2
    BYTES: tl.constexpr = GROUP * BITS // 8
    whole, half, byte = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, BYTES)
    x += token.to(tl.int64)[:, None] * (G * GROUP)
    weight += output[:, None] * BYTES + byte
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, G), GROUPS):
        for step in tl.static_range(GROUPS):
            group = first + step
            here = group < G
            place = group.to(tl.int64)
            packed = tl.load(weight + place * weight_group, is_output[:, None] & here, 0)
            s = tl.load(scale + place * scale_group + output, is_output & here, 0.0)
            s = s.to(tl.float32)
            given = is_token[:, None] & here
            if BITS == 8:
                inputs = tl.load(x + group * GROUP + whole, given, 0.0)
                product = tl.dot(inputs, tl.trans(packed.to(inputs.dtype)), input_precision="ieee")
                total = tl.sum(inputs.to(tl.float32), 1)
            else:
                low = tl.load(x + group * GROUP + half, given, 0.0)
                high = tl.load(x + group * GROUP + HALF + half, given, 0.0)
                low_weight, high_weight = (packed & 15).to(low.dtype), (packed >> 4).to(low.dtype)
                product = tl.dot(low, tl.trans(low_weight), input_precision="ieee")
                product += tl.dot(high, tl.trans(high_weight), input_precision="ieee")
                total = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
            sums += product * s
            if OFFSETS:
                m = tl.load(offset + place * scale_group + output, is_output & here, 0.0)
                sums += total[:, None] * m.to(tl.float32)
    if BIAS:
        sums += tl.load(bias + output, is_output, 0.0).to(tl.float32)
    parts += (part.to(tl.int64) * M + token[:, None]) * N + output
    tl.store(parts, sums, is_token[:, None] & is_output)


@triton.jit(do_not_specialize=["M", "num"])
def _add_parts(parts, bias, found, M, N, num, BIAS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = output < N
    total = tl.zeros([COLUMNS], tl.float32)
    for part in range(num):
        total += tl.load(parts + (part * M + token) * N + output, here, 0.0)
    if BIAS:
        total += tl.load(bias + output, here, 0.0).to(tl.float32)
    tl.store(found + token * N + output, total, here)
