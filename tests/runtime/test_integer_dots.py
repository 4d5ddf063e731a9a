"""Kernels over weights of few bits and inputs that are rounded to eight bits: the integers are
exact, and a token has the same bits at any width.

Legend: M tokens, K inputs, N outputs, G groups.
"""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_weights import any_weight, packed
from torch import Tensor
from torch.utils import cpp_extension

from outrider.runtime.kernels import build, processors
from outrider.runtime.kernels.grouped import GroupedLinear, GroupedWeight, rounded_inputs
from outrider.runtime.kernels.packing import pack_integer_dots

pytestmark = [
    pytest.mark.vector_width,
    pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here"),
]

ANY_NUMBER = 2**62  # of tokens: that of layers in exact models
FORMATS = [(8, 32, False), (8, 128, False), (4, 32, False), (4, 128, False), (4, 64, True)]
formats = pytest.mark.parametrize(("bits", "group", "offsets"), FORMATS)

PROGRAM = Path(__file__).parent / "integer_dots.cpp"
WITHOUT_VNNI = (processors.AVX2, processors.AVX512)


def rounding(weight: GroupedWeight, bias: Tensor | None = None) -> GroupedLinear:
    return packed(weight, bias, rounds_inputs=True)


@torch.inference_mode()
@formats
@pytest.mark.parametrize("N", [1, 16, 33, 70])
def test_packing_loses_nothing(bits: int, group: int, offsets: bool, N: int) -> None:
    """A group of one 127 and zeros is not rounded: its integers are those, and its scale is 1."""
    weight = any_weight(N, 256, bits, group, offsets)
    found = rounding(weight)(127 * torch.eye(256)).T
    wanted = 127 * weight.dequantized().double()
    assert ((found - wanted).abs() <= 2.0**-22 * (wanted.abs() + 127 * 8)).all()


@torch.inference_mode()
@formats
@pytest.mark.parametrize("N", [5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_at_any_width(
    bits: int, group: int, offsets: bool, N: int, dtype: torch.dtype
) -> None:
    """Many tokens at once only in exact models: ``test_folded_tiles.py`` has the others."""
    layer: Any = rounding(any_weight(N, 256, bits, group, offsets), torch.randn(N))
    x = torch.randn(80, 256).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    assert alone.dtype == dtype
    for width in (*range(2, 15), 24, 25):
        assert torch.equal(torch.cat([layer(part) for part in x.split(width)]), alone)
    if processors.processor() is processors.AMX:
        layer.widest = ANY_NUMBER
    assert torch.equal(layer(x), alone)
    assert torch.equal(layer(x.view(5, 16, 256)), alone.view(5, 16, N))


@torch.inference_mode()
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_those_of_float64(
    bits: int, group: int, offsets: bool, dtype: torch.dtype
) -> None:
    """Each group errs by at most three roundings of its part, of its offset's part and of the sum;
    a result in few bits is rounded once more."""
    weight = any_weight(40, 256, bits, group, offsets)
    layer = rounding(weight)
    x = torch.randn(17, 256).to(dtype)
    inputs, weight_NK = rounded_inputs(x.float(), group).double(), weight.dequantized().double()
    wanted, magnitude = inputs @ weight_NK.T, inputs.abs() @ weight_NK.abs().T
    largest = weight.scale_NG.max() * 2**bits + (0 if weight.offset_NG is None else 8)
    bound = 2.0**-20 * (magnitude + inputs.abs().sum(-1, keepdim=True) * largest)
    if dtype != torch.float32:
        bound = bound + 2.0**-8 * wanted.abs()
    assert ((layer(x).double() - wanted).abs() <= bound).all()


@torch.inference_mode()
@formats
def test_the_plain_code_computes_the_same(bits: int, group: int, offsets: bool) -> None:
    weight, bias = any_weight(20, 128, bits, group, offsets), torch.randn(20)
    x = torch.randn(3, 128)
    plain, ours = GroupedLinear(weight, bias, True)(x), rounding(weight, bias)(x)
    assert float((plain - ours).abs().max()) <= 1e-5 * float(ours.abs().max())


@torch.inference_mode()
def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Unlike with one scale for all tokens of a forward pass."""
    layer = rounding(any_weight(40, 128, 8, 32, False))
    x = torch.randn(4, 128)
    louder = x * torch.tensor([[1.0], [1e4], [1e-4], [0.0]])
    assert torch.equal(layer(louder)[0], layer(x)[0])


@torch.inference_mode()
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_stay_so(bad: float) -> None:
    layer = rounding(any_weight(40, 128, 8, 32, False))
    x = torch.randn(2, 128)
    x[1, 77] = bad
    y = layer(x)
    assert y[0].isfinite().all()
    assert not y[1].isfinite().any()


@torch.inference_mode()
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-33, 1e30])
def test_tiny_and_huge_inputs(size: float) -> None:
    """Each input errs by half a 127th of the largest, or is below 1e-30 and counts as zero."""
    weight = any_weight(40, 128, 8, 32, False)
    x, weight_NK = size * torch.randn(2, 128), weight.dequantized().double()
    y, wanted = rounding(weight)(x), x.double() @ weight_NK.T
    step = float(x.double().abs().max()) / 127
    assert ((y - wanted).abs() <= (0.501 * step + 1e-30) * weight_NK.abs().sum(1)).all()


@torch.inference_mode()
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="products and sums are not fused"
)
def test_bits_are_the_same_on_all_processors() -> None:
    """Of numbers that no random generator makes, which may depend on the processor, too."""
    integers = torch.arange(70 * 128).view(70, 128)
    values_NK = (integers * 37 % 255 - 127).to(torch.int8)
    scale_NG = ((integers[:, ::32] * 29 % 97 + 1) / 4096).half()
    x = (integers[:9] * 41 % 1009 - 504) / 64
    y = rounding(GroupedWeight(values_NK, scale_NG, None, 8))(x)
    found = hashlib.sha256(y.numpy().tobytes()).hexdigest()[:16]
    assert found == "d7b96de0f323b2cd"


def test_rounding_errs_by_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, 256)
    step = x.view(5, 7, 8, 32).abs().amax(-1, keepdim=True) / 127
    error = (rounded_inputs(x, 32) - x).view(5, 7, 8, 32).abs()
    assert (error <= step * (0.5 + 1e-4)).all()
    assert not torch.equal(rounded_inputs(x, 32), x)


def test_packing_refuses_what_the_kernel_does_not_read() -> None:
    rounding(any_weight(1, 32, 8, 32, False))  # loads the kernels
    values, scale = torch.zeros(2, 48, dtype=torch.int8), torch.zeros(2, 2).half()
    with pytest.raises(ValueError, match="groups of 24 inputs are no multiple of 32"):
        pack_integer_dots(values, scale, None, 8)
    scale = torch.zeros(2, 1).half()
    with pytest.raises(ValueError, match="groups of 48 inputs are no multiple of 32"):
        pack_integer_dots(values, scale, None, 4)
    with pytest.raises(ValueError, match="8 bits with offsets"):
        pack_integer_dots(values[:, :32].contiguous(), scale, scale, 8)


@pytest.mark.parametrize("kind", WITHOUT_VNNI, ids=lambda kind: kind.name)
def test_processors_without_vnni_compute_the_same_integers(
    kind: processors.Processor, tmp_path: Path
) -> None:
    """The program is built for such a processor; with instructions for dot products the tests above
    run."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", kind.capability):
        pytest.skip(f"needs a processor with {kind.name}")
    includes = [f"-I{path}" for path in (build.SOURCES[0].parent, *cpp_extension.include_paths())]
    out = tmp_path / "integer_dots"
    defines = [f"-DCPU_CAPABILITY={kind.capability}", f"-DCPU_CAPABILITY_{kind.capability}"]
    command = [str(build.find_compiler()), "-std=c++20", "-w", str(PROGRAM), "-o", str(out)]
    command += [*kind.flags, *defines, "-DOUTRIDER_TILES_FROM=16", *includes]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-fopenmp"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = subprocess.run([str(out)], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("right", 0)
