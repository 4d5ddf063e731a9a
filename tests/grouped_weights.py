"""Random weights of few bits, and layers of them."""

import torch
from torch import Tensor

from outrider.runtime.kernels import NarrowLinear, use_grouped_kernels
from outrider.runtime.kernels.grouped import GroupedLinear, GroupedWeight


def any_weight(N: int, K: int, bits: int, group: int, offsets: bool) -> GroupedWeight:
    """Every integer that the format has, the extremes included."""
    torch.manual_seed(N)
    low, high = (-128, 128) if bits == 8 else (0, 16) if offsets else (-8, 8)
    values_NK = torch.randint(low, high, (N, K), dtype=torch.int8)
    values_NK[0, :2] = torch.tensor([low, high - 1])
    scale_NG = (torch.rand(N, K // group) * 0.01).half()
    offset_NG = torch.randn(N, K // group).half() if offsets else None
    return GroupedWeight(values_NK, scale_NG, offset_NG, bits)


def packed(
    weight: GroupedWeight, bias: Tensor | None = None, rounds_inputs: bool = False
) -> GroupedLinear:
    """A layer that the kernels have taken over."""
    layer = GroupedLinear(weight, bias, rounds_inputs)
    use_grouped_kernels(layer, "layer")
    assert type(layer) is NarrowLinear
    return layer
