"""Weights of 8 or 4 bits with a scale per group of inputs.

    w = s q        or, with an offset,        w = s q + m

for integers q, and a scale s and an offset m per group of inputs of one output, both float16. These
are the formats of GGUF's blocks: Q8_0 and Q4_0 have no offset, Q4_1 has one. An offset is a zero
point z in other terms: m = -s z.

:class:`GroupedLinear` computes with such weights in plain torch, on any processor. Where there is a
C++ compiler, the kernels take the layer over (``layers.py``) and compute with the same weights from
packed memory (``grouped.h``).

A layer may also round its inputs, as llama.cpp does: a group of a token's inputs becomes integers
of eight bits and a scale (:func:`rounded_inputs`). Its products are then products of integers, of
which processors compute two to four times as many (``integer_dots.h``).

Legend: K inputs, N outputs, G groups of inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

STEP = 8
"""The number of inputs in a group is a multiple of this."""

CHUNK = 32
"""The number of inputs in a group is a multiple of this where they are rounded."""


@dataclass(frozen=True)
class GroupedWeight:
    """The weight of a linear layer in few bits.

    Attributes:
        values_NK: the integers q, as int8: -128 to 127 in eight bits; in four bits -8 to 7, or 0 to
            15 with offsets.
        scale_NG: s, float16.
        offset_NG: m, float16; None where all are 0.
        bits: 8 or 4.
    """

    values_NK: Tensor
    scale_NG: Tensor
    offset_NG: Tensor | None
    bits: int

    @property
    def group(self) -> int:
        """Inputs per group."""
        return self.values_NK.shape[1] // self.scale_NG.shape[1]

    def rows(self, order_N: Tensor) -> "GroupedWeight":
        """The weight with its outputs in another order."""
        offset_NG = None if self.offset_NG is None else self.offset_NG[order_N]
        return GroupedWeight(self.values_NK[order_N], self.scale_NG[order_N], offset_NG, self.bits)

    def dequantized(self) -> Tensor:
        """The weights (N, K) in float32. Products are exact; adding an offset rounds once."""
        N, K = self.values_NK.shape
        weight_NGK = self.values_NK.float().view(N, -1, self.group)
        weight_NGK = weight_NGK * self.scale_NG.float()[..., None]
        if self.offset_NG is not None:
            weight_NGK = weight_NGK + self.offset_NG.float()[..., None]
        return weight_NGK.view(N, K)


def rounded(weight_NK: Tensor, bits: int, group: int, offsets: bool) -> GroupedWeight:
    """A weight rounded to few bits.

    Without offsets, a scale makes the largest magnitude of its group the largest integer. With
    offsets, the integers span the range from the smallest to the largest weight of the group.

    Args:
        weight_NK: the weight, finite.
        bits: 8 or 4.
        group: inputs per group; a multiple of ``STEP`` that divides K.
        offsets: whether groups have offsets, with which all ``2 ** bits`` integers are used.

    Raises:
        ValueError: groups that do not divide the inputs, or weights too large for float16 scales.
    """
    N, K = weight_NK.shape
    if K % group or group % STEP:
        raise ValueError(f"{K} inputs do not divide into groups of {group}, a multiple of {STEP}")
    weight_NGK = weight_NK.detach().float().view(N, K // group, group)
    top = 2 ** (bits - 1)
    if offsets:
        low_NG, high_NG = weight_NGK.aminmax(dim=-1)
        shift = 0 if bits == 4 else top  # integers of eight bits are signed
        scale_NG = ((high_NG - low_NG) / (2 * top - 1)).half()
        offset_NG = (low_NG + shift * scale_NG.float()).half()
        bounds = -shift, 2 * top - 1 - shift
    else:
        scale_NG = (weight_NGK.abs().amax(-1) / (top - 1)).half()
        offset_NG, bounds = None, (1 - top, top - 1)
    if not scale_NG.isfinite().all() or (offset_NG is not None and not offset_NG.isfinite().all()):
        raise ValueError(
            f"weights up to {weight_NGK.abs().max():.3g} are beyond the scales, which are float16"
        )
    centred_NGK = weight_NGK if offset_NG is None else weight_NGK - offset_NG.float()[..., None]
    values_NGK = centred_NGK / scale_NG.float()[..., None].clamp_min(2.0**-24)
    values_NK = values_NGK.round().clamp(*bounds).to(torch.int8).view(N, K)
    return GroupedWeight(values_NK, scale_NG, offset_NG, bits)


def rounded_inputs(x: Tensor, group: int) -> Tensor:
    """Inputs rounded to multiples of a 127th of the largest magnitude of their group.

    Args:
        x: (…, K), in float32.
        group: inputs per group; divides K.
    """
    split = x.view(*x.shape[:-1], -1, group)
    magnitude = split.abs().amax(-1, keepdim=True)
    top = torch.full_like(magnitude, 127.0)  # a scalar would be multiplied by a reciprocal
    inverse = torch.where(magnitude < 1e-30, 0.0, top / magnitude)
    return ((split * inverse).round() * (magnitude / 127.0)).view(x.shape)


class GroupedLinear(nn.Module):
    """A linear layer with weights of few bits, computed by dequantising them in every call. The
    kernels compute the same, faster.

    Attributes:
        weight: the integers; int8, so that T5 does not convert its activations to their dtype.
        rounds_inputs: whether its inputs are rounded to eight bits, too.
    """

    weight: Tensor
    scale_NG: Tensor
    offset_NG: Tensor | None

    def __init__(
        self, weight: GroupedWeight, bias: Tensor | None, rounds_inputs: bool = False
    ) -> None:
        super().__init__()
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features = weight.values_NK.shape
        self.bits = weight.bits
        self.bias = bias
        self.register_buffer("weight", weight.values_NK)
        self.register_buffer("scale_NG", weight.scale_NG)
        self.register_buffer("offset_NG", weight.offset_NG)

    @property
    def grouped(self) -> GroupedWeight:
        """The weight."""
        return GroupedWeight(self.weight, self.scale_NG, self.offset_NG, self.bits)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, (…, K) to (…, N) in the dtype of x; computed in float32."""
        bias = None if self.bias is None else self.bias.float()
        inputs = rounded_inputs(x.float(), self.grouped.group) if self.rounds_inputs else x.float()
        return functional.linear(inputs, self.grouped.dequantized(), bias).to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group={self.grouped.group}, rounds_inputs={self.rounds_inputs}"
        )
