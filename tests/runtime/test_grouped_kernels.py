"""Kernels over weights of few bits compute what a layer of the dequantised weights computes, with
the same bits at any width.

Legend: K inputs, N outputs, G groups.
"""

import itertools

import pytest
import torch
from grouped_weights import any_weight, packed
from torch import Tensor, nn

from outrider.runtime.kernels import build, use_kernels
from outrider.runtime.kernels.grouped import GroupedLinear, GroupedWeight, rounded
from outrider.runtime.kernels.packing import pack_groups

pytestmark = [
    pytest.mark.vector_width,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here"),
]

FORMATS = list(itertools.product((8, 4), (32, 128), (False, True)))
formats = pytest.mark.parametrize(("bits", "group", "offsets"), FORMATS)


def as_float32(weight: GroupedWeight, bias: Tensor | None) -> nn.Linear:
    """A layer of the dequantised weights, packed in float32 (a layer named ``wo`` keeps its
    dtype)."""
    N, K = weight.values_NK.shape
    layer = nn.Linear(K, N, bias is not None)
    layer.weight = nn.Parameter(weight.dequantized(), False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, False)
    use_kernels(nn.ModuleDict({"wo": layer}), exact=True, compact=True)
    return layer


@torch.inference_mode()
@formats
@pytest.mark.parametrize("N", [1, 16, 33, 70])
def test_packing_loses_nothing(bits: int, group: int, offsets: bool, N: int) -> None:
    """The outputs for the rows of the identity matrix are sums of one weight and zeros."""
    weight = any_weight(N, 256, bits, group, offsets)
    assert torch.equal(packed(weight)(torch.eye(256)).T, weight.dequantized())


@torch.inference_mode()
@formats
@pytest.mark.parametrize("N", [5, 70])
def test_bits_are_those_of_float32_weights_at_any_width(
    bits: int, group: int, offsets: bool, N: int
) -> None:
    """So every test of exactness of float32 layers holds for layers of few bits."""
    weight, bias = any_weight(N, 256, bits, group, offsets), torch.randn(N)
    few, wide = packed(weight, bias), as_float32(weight, bias)
    x = torch.randn(80, 256)
    alone = torch.cat([few(row[None]) for row in x])
    assert torch.equal(alone, wide(x))
    for width in (*range(2, 18), 24, 25, 40, 80):
        assert torch.equal(torch.cat([few(part) for part in x.split(width)]), alone)
    assert torch.equal(few(x.view(5, 16, 256)), alone.view(5, 16, N))


@torch.inference_mode()
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_float64(
    bits: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    """Sums of 256 products in float32 err by at most 256 units of 2**-24 of the sum of magnitudes;
    a result in bfloat16 is rounded by at most 2**-8 of itself."""
    weight = any_weight(40, 256, bits, group, offsets)
    layer = packed(weight)
    weight_NK = weight.dequantized().double()
    for tokens in range(1, 18):
        x = torch.randn(tokens, 256).to(dtype)
        wanted, magnitude = x.double() @ weight_NK.T, x.double().abs() @ weight_NK.abs().T
        bound = 256 * 2.0**-24 * magnitude
        if dtype == torch.bfloat16:
            bound = bound + 2.0**-8 * wanted.abs()
        result = layer(x)
        assert result.dtype == dtype
        assert ((result.double() - wanted).abs() <= bound).all()


@torch.inference_mode()
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_joined_layers_may_have_different_formats(rounds_inputs: bool) -> None:
    kinds = [(8, 32, False), (4, 128, True), (4, 32, False)]
    layers = [
        packed(any_weight(N, 128, *kind), rounds_inputs=rounds_inputs)
        for N, kind in zip((33, 5, 70), kinds, strict=True)
    ]
    x = torch.randn(2, 7, 128)
    weights = [layer.weight for layer in layers]
    joined = torch.ops.outrider.linears(x, weights, [], [33, 5, 70], 32)
    assert torch.equal(joined, torch.cat([layer(x) for layer in layers], -1))


@torch.inference_mode()
@formats
def test_the_plain_code_computes_the_same(bits: int, group: int, offsets: bool) -> None:
    weight, bias = any_weight(20, 128, bits, group, offsets), torch.randn(20)
    x = torch.randn(3, 128)
    plain, ours = GroupedLinear(weight, bias)(x), packed(weight, bias)(x)
    assert float((plain - ours).abs().max()) <= 1e-5 * float(ours.abs().max())


@formats
def test_rounding_errs_by_half_a_step(bits: int, group: int, offsets: bool) -> None:
    """And by what float16 scales and offsets lack: 2**-11 of the range, and of the offset."""
    torch.manual_seed(0)
    weight_NK = torch.randn(8, 256) + 0.5
    weight = rounded(weight_NK, bits, group, offsets)
    step_NG = weight.scale_NG.float()
    slack_NG = 2.0**bits * step_NG * 2.0**-11
    if weight.offset_NG is not None:
        slack_NG = slack_NG + weight.offset_NG.float().abs() * 2.0**-10
    error_NG = (weight.dequantized() - weight_NK).abs().view(8, -1, group).amax(-1)
    assert (error_NG <= step_NG / 2 + slack_NG).all()
    assert weight.group == group


@pytest.mark.parametrize("value", [0.0, 0.7, -0.7])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_constant_groups_are_finite(bits: int, offsets: bool, value: float) -> None:
    weight = rounded(torch.full((2, 32), value), bits, 32, offsets)
    assert float((weight.dequantized() - value).abs().max()) <= 2.0**-10


@pytest.mark.parametrize(("inputs", "group"), [(48, 32), (40, 20), (30, 6)])
def test_sizes_that_do_not_divide_are_refused(inputs: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"{inputs} inputs do not divide into groups of {group}"):
        rounded(torch.zeros(2, inputs), 4, group, True)


def test_packing_refuses_what_the_kernels_do_not_read() -> None:
    use_kernels(nn.Linear(8, 8))
    values, scale = torch.zeros(2, 40, dtype=torch.int8), torch.zeros(2, 2).half()
    with pytest.raises(ValueError, match="40 inputs are not 2 groups of a multiple of 8"):
        pack_groups(values, scale, None, 4)
    with pytest.raises(ValueError, match="integers of 3 bits"):
        pack_groups(values, scale[:, :1], None, 3)
