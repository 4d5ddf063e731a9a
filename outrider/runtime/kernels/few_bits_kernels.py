"""Products with weights of few bits on a GPU, in Triton (``grouped.py`` says what the weights are).

A product over a few tokens takes as long as its weights are read, unless making numbers of them
takes longer. Of few tokens, each thread multiplies what it has read itself. Matrix units, which
multiply more tokens, read their operands from shared memory, where threads must put them first.

Legend: M tokens, K inputs, N outputs, G groups of inputs, P bytes of a group, L shares of the
groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.runtime.kernels.gpu_kernels import on_device_of

_FEW = 2
"""Most tokens that are multiplied without matrix units."""

_ROWS = 128
"""Outputs of a block where tokens are few: one per thread."""

_OUTPUTS = 128
"""Outputs of a block of matrix units."""

_INPUTS = 64
"""Inputs that a step of matrix units reads."""

_BLOCKS = 1056
"""Blocks that keep a GPU busy: eight per multiprocessor; of those without matrix units, which are
smaller, twice as many."""

_MOST_PARTS = 64

_VECTOR = tl.constexpr(16)
"""Bytes that a thread reads at a time."""


def few_bits_product(
    x: Tensor,
    weight_GNP: Tensor,
    scale_GN: Tensor,
    offset_GN: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """``x Wᵀ + b`` for weights ``w = s q + m`` (``grouped.py``), computed in float32.

    The groups are divided among several blocks, whose sums a second kernel adds in their order.

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
    group = P * 8 // bits
    if M <= _FEW:
        tokens, step, blocks = triton.next_power_of_2(M), 1, triton.cdiv(N, _ROWS)
        most = 2 * _BLOCKS
    else:
        tokens = min(max(triton.next_power_of_2(M), 16), 64)
        step = max(1, _INPUTS // group)
        blocks, most = triton.cdiv(N, _OUTPUTS) * triton.cdiv(M, tokens), _BLOCKS
    share = _share(G, step, blocks, most)
    parts_LMN = x.new_empty(triton.cdiv(G, share), M, N, dtype=torch.float32)
    given = (
        x_MK,
        weight_GNP,
        scale_GN,
        scale_GN if offset_GN is None else offset_GN,
        parts_LMN,
        weight_GNP.stride(0),
        scale_GN.stride(0),
        M,
        N,
        G,
        share,
    )
    sizes = {"GROUP": group, "BITS": bits, "OFFSETS": offset_GN is not None, "TOKENS": tokens}
    with on_device_of(x):
        if M <= _FEW:
            grid: tuple[int, ...] = triton.cdiv(N, _ROWS), len(parts_LMN)
            _multiply_few[grid](*given, **sizes, ROWS=_ROWS, num_warps=4)
        else:
            grid = triton.cdiv(N, _OUTPUTS), triton.cdiv(M, tokens), len(parts_LMN)
            more = {"OUTPUTS": _OUTPUTS, "GROUPS": step, "num_warps": 8, "num_stages": 2}
            _multiply[grid](*given, **sizes, **more)
        _add(parts_LMN, bias, found_MN)
    return found_MN.view(*x.shape[:-1], N)


def _share(groups: int, step: int, blocks: int, most: int) -> int:
    """How many groups a block multiplies, a multiple of ``step``, where a share of the groups takes
    so many blocks, and all shares together at most ``most``."""
    steps = triton.cdiv(groups, step)
    num = max(1, min(_MOST_PARTS, steps, most // blocks))
    share: int = triton.cdiv(steps, num) * step
    return share


def _add(parts_LMN: Tensor, bias: Tensor | None, found_MN: Tensor) -> None:
    num, M, N = parts_LMN.shape
    width = triton.next_power_of_2(num)
    columns = 4096 // width
    _add_parts[(M, triton.cdiv(N, columns))](
        parts_LMN,
        parts_LMN if bias is None else bias,
        found_MN,
        M,
        N,
        num,
        BIAS=bias is not None,
        PARTS=width,
        COLUMNS=columns,
    )


@triton.jit(do_not_specialize=["M", "G", "share"])
def _multiply_few(
    x,
    weight,
    scale,
    offset,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A thread reads bytes of an output, a vector register at a time, and multiplies their integers
    by the inputs of all tokens."""
    output, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    is_output = output < N
    BYTES: tl.constexpr = GROUP * BITS // 8
    byte = tl.arange(0, _VECTOR)
    weight += output[:, None] * BYTES + byte
    weight_group, scale_group = tl.cast(weight_group, tl.int64), tl.cast(scale_group, tl.int64)
    sums = (tl.zeros([ROWS, _VECTOR], tl.float32),) * TOKENS
    for group in range(part * share, tl.minimum(part * share + share, G)):
        s = tl.load(scale + group * scale_group + output, is_output, 0.0).to(tl.float32)[:, None]
        m = tl.zeros([ROWS], tl.float32)[:, None]
        if OFFSETS:
            m = tl.load(offset + group * scale_group + output, is_output, 0.0)[:, None]
            m = m.to(tl.float32)
        for first in tl.static_range(0, BYTES, _VECTOR):
            packed = tl.load(weight + group * weight_group + first, is_output[:, None], 0)
            low = packed if BITS == 8 else packed & 15
            w = low.to(tl.float32) * s + m
            high = (packed >> 4).to(tl.float32) * s + m
            next_sums = ()
            for token in tl.static_range(TOKENS):
                at = x + (token * G + group) * GROUP + first + byte
                total = sums[token] + w * tl.load(at, token < M, 0.0).to(tl.float32)[None, :]
                if BITS == 4:
                    more = tl.load(at + BYTES, token < M, 0.0).to(tl.float32)
                    total += high * more[None, :]
                next_sums += (total,)  # type: ignore[assignment]
            sums = next_sums
    for token in tl.static_range(TOKENS):
        at = parts + (part.to(tl.int64) * M + token) * N + output
        tl.store(at, tl.sum(sums[token], 1), is_output & (token < M))


@triton.jit(do_not_specialize=["M", "G", "share"])
def _multiply(
    x,
    weight,
    scale,
    offset,
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
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Matrix units multiply the integers, which are numbers of x's dtype, and a group's sum is
    scaled."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    is_output, is_token = output < N, token < M
    HALF: tl.constexpr = GROUP // 2
    BYTES: tl.constexpr = GROUP * BITS // 8
    whole, half, byte = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, BYTES)
    x += token.to(tl.int64) * (G * GROUP)
    weight += output[:, None] * BYTES + byte
    weight_group, scale_group = tl.cast(weight_group, tl.int64), tl.cast(scale_group, tl.int64)
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, G), GROUPS):
        for step in tl.static_range(GROUPS):
            group = first + step
            here = group < G
            packed = tl.load(weight + group * weight_group, is_output[:, None] & here, 0)
            s = tl.load(scale + group * scale_group + output, is_output & here, 0.0)
            s, given = s.to(tl.float32), is_token & here
            if BITS == 8:
                inputs = tl.load(x + group * GROUP + whole[:, None], given, 0.0)
                product = tl.dot(packed.to(inputs.dtype), inputs, input_precision="ieee")
                total = tl.sum(inputs.to(tl.float32), 0)
            else:
                low = tl.load(x + group * GROUP + half[:, None], given, 0.0)
                high = tl.load(x + group * GROUP + HALF + half[:, None], given, 0.0)
                product = tl.dot((packed & 15).to(low.dtype), low, input_precision="ieee")
                product += tl.dot((packed >> 4).to(low.dtype), high, input_precision="ieee")
                total = tl.sum(low.to(tl.float32), 0) + tl.sum(high.to(tl.float32), 0)
            sums += product * s[:, None]
            if OFFSETS:
                m = tl.load(offset + group * scale_group + output, is_output & here, 0.0)
                sums += m.to(tl.float32)[:, None] * total[None, :]
    parts += (part.to(tl.int64) * M + token[None, :]) * N + output[:, None]
    tl.store(parts, sums, is_token[None, :] & is_output[:, None])


@triton.jit(do_not_specialize=["M", "num"])
def _add_parts(
    parts,
    bias,
    found,
    M,
    N,
    num,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part, here = tl.arange(0, PARTS)[:, None], output < N
    at = parts + (part.to(tl.int64) * M + token) * N + output
    total = tl.sum(tl.load(at, (part < num) & here, 0.0), 0)
    if BIAS:
        total += tl.load(bias + output, here, 0.0).to(tl.float32)
    tl.store(found + token * N + output, total, here)
