"""Weights of few bits that the matrix unit multiplies as bfloat16 numbers for many tokens.

Legend: M tokens, K inputs, N outputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_weights import any_weight, packed
from test_tiles import AVX512_ONLY, run_program

from outrider.runtime.kernels import build, processors
from outrider.runtime.kernels.grouped import rounded_inputs

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")

PROGRAM = Path(__file__).parent / "folded_tiles.cpp"
FORMATS = [(8, 32, False), (8, 128, False), (4, 32, False), (4, 128, False), (4, 64, True)]
ANY_NUMBER = 2**62  # of tokens: that of layers in exact models
ON_AMX = pytest.mark.skipif(
    processors.processor() is not processors.AMX, reason="no matrix unit on this processor"
)


@AVX512_ONLY
def test_folded_weights_multiply_to_the_products(tmp_path: Path) -> None:
    """By emulated blocks, on any processor with AVX-512."""
    run_program(PROGRAM, tmp_path, *processors.AVX512.flags, "-DOUTRIDER_EMULATED_TILES")


@ON_AMX
def test_the_matrix_unit_multiplies_folded_weights(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, *processors.AMX.flags, "-O3")


@ON_AMX
@torch.inference_mode()
@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize(("bits", "group", "offsets"), FORMATS)
def test_many_tokens_err_by_roundings_to_bfloat16(
    bits: int, group: int, offsets: bool, rounds_inputs: bool
) -> None:
    """Of each weight, of each input, and of the result, by 2**-8 of it each. Fewer tokens and exact
    models have none of the first two."""
    weight, M = any_weight(70, 256, bits, group, offsets), processors.AMX.folded_from
    layer: Any = packed(weight, rounds_inputs=rounds_inputs)
    x = torch.randn(M + 9, 256).bfloat16()
    inputs = rounded_inputs(x.float(), group) if rounds_inputs else x.float()
    wanted = inputs.double() @ weight.dequantized().double().T
    magnitude = inputs.double().abs() @ weight.dequantized().double().abs().T
    error = (layer(x).double() - wanted).abs()
    assert (error <= 2.0**-7 * 1.01 * magnitude + 2.0**-8 * wanted.abs()).all()
    few = torch.cat([layer(part) for part in x.split(M - 1)])
    layer.widest = ANY_NUMBER
    for y in (few, layer(x)):
        assert ((y.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-14 * magnitude).all()


@ON_AMX
@torch.inference_mode()
def test_float32_inputs_are_not_rounded_to_bfloat16() -> None:
    weight = any_weight(70, 256, 8, 32, False)
    x = torch.randn(processors.AMX.folded_from, 256)
    for rounds_inputs in (False, True):
        layer = packed(weight, rounds_inputs=rounds_inputs)
        assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))
