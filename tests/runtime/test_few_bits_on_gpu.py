"""Products with weights of few bits by Triton's kernels compute what the plain code does."""

from typing import Any

import pytest
import torch
from gpu_here import DEVICE, DTYPES, NEEDS_TRITON
from tiny_models import full_logits, tiny_module
from torch import nn
from torch.nn import functional

from outrider.core.errors import InvalidParameterError, KernelError
from outrider.runtime.hf.quantize import quantize
from outrider.runtime.kernels import few_bits_linear
from outrider.runtime.kernels.few_bits_linear import FewBitsLinear, use_few_bits_kernels
from outrider.runtime.kernels.fused_layers import use_fused_layers
from outrider.runtime.kernels.grouped import GroupedLinear, GroupedWeight, rounded
from outrider.runtime.kernels.joined_linears import can_join, join, joined_linear

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def weights(outputs: int, inputs: int, bits: int, group: int, offsets: bool) -> GroupedWeight:
    return rounded(random(outputs, inputs), bits, group, offsets)


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within two roundings of the largest number, or a long sum's in float32."""
    ε = torch.finfo(found.dtype).eps
    allowed = (2 if ε > 1e-4 else 16) * ε * float(wanted.abs().max())
    return float((found.double() - wanted.double()).abs().max()) <= allowed


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "offsets"), [(8, False), (8, True), (4, False), (4, True)])
@pytest.mark.parametrize(
    ("M", "K", "N", "group", "bias"),
    [(1, 256, 100, 32, True), (2, 1280, 70, 128, False), (40, 288, 129, 32, True)],
)
def test_products(
    M: int, K: int, N: int, group: int, bias: bool, bits: int, offsets: bool, dtype: torch.dtype
) -> None:
    weight, b = weights(N, K, bits, group, offsets), random(N) if bias else None
    layer = FewBitsLinear(GroupedLinear(weight, b), dtype)
    x = random(2, M, K).to(dtype)
    exact = None if b is None else b.double()
    wanted = functional.linear(x.double(), weight.dequantized().double(), exact)
    assert near(layer(x), wanted)
    assert layer(x[:, :0]).shape == (2, 0, N)


@NEEDS_TRITON
@pytest.mark.parametrize("offsets", [False, True])
def test_joined_layers(offsets: bool) -> None:
    layers = [
        FewBitsLinear(GroupedLinear(weights(N, 64, 8, 32, offsets), random(N)), torch.float32)
        for N in (48, 16, 16)
    ]
    x = random(3, 64)
    wanted = torch.cat([layer(x) for layer in layers], -1)
    assert can_join(layers)
    for _ in range(2):
        join(layers)
        assert near(joined_linear(x, layers), wanted)
        assert near(torch.cat([layer(x) for layer in layers], -1), wanted)
    first, second = (layer.weight for layer in layers[:2])
    assert second.data_ptr() - first.data_ptr() == 48 * first.stride(1)
    other = FewBitsLinear(GroupedLinear(weights(48, 64, 4, 32, False), random(48)), torch.float32)
    assert not can_join([layers[0], other])
    assert not can_join([layers[0], nn.Linear(64, 48)])


def grouped(kind: tuple[int, bool], dtype: torch.dtype) -> Any:
    module: Any = tiny_module("llama", dtype=dtype, intermediate_size=64).to(DEVICE).eval()
    for path, layer in list(module.named_modules()):
        if type(layer) is nn.Linear:
            weight = rounded(layer.weight, kind[0], 32, kind[1])
            module.set_submodule(path, GroupedLinear(weight, layer.bias))
    return module


@NEEDS_TRITON
@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [(8, False), (4, True)])
def test_models_compute_the_same(kind: tuple[int, bool], dtype: torch.dtype) -> None:
    """By the kernels, and by layers that use them joined."""
    module = grouped(kind, dtype)
    wanted_TV = full_logits(module, TOKENS).double()
    allowed = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}[dtype]
    use_few_bits_kernels(module)
    assert sum(isinstance(each, FewBitsLinear) for each in module.modules()) == 15
    use_fused_layers(module, "tiny")
    assert all("forward" in vars(each) for each in module.model.layers)
    error_TV = full_logits(module, TOKENS).double() - wanted_TV
    assert float(error_TV.norm() / wanted_TV.norm()) < allowed


def test_without_triton_the_plain_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_bits_linear, "find_spec", lambda _: None)
    module = grouped((8, False), torch.float32)
    with pytest.raises(KernelError, match="Triton, which is not installed"):
        use_few_bits_kernels(module)
    assert not any(isinstance(each, FewBitsLinear) for each in module.modules())


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU here")
@pytest.mark.parametrize("kind", ["int8:32", "int8:128", "int4:32", "int4:128"])
def test_models_on_a_gpu_have_the_weights_of_a_cpu(kind: str) -> None:
    wanted_TV = full_logits(quantize(tiny_module("llama", dtype=torch.float32), kind), TOKENS)
    module = quantize(tiny_module("llama", dtype=torch.float32).cuda(), kind)
    assert any(isinstance(each, FewBitsLinear) for each in module.modules())
    found_TV = full_logits(module, TOKENS)
    assert float((found_TV - wanted_TV).norm() / wanted_TV.norm()) < 1e-4
    with pytest.raises(InvalidParameterError, match=rf"use {kind}$"):
        quantize(tiny_module("llama", dtype=torch.float32).cuda(), f"{kind}+a8")
