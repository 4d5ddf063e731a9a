"""Exact and compiled forward passes over weights of few bits: the bits of the eager ones."""

from typing import Any

import pytest
import torch
from exact_outputs import assert_exact, near
from interpreted_graphs import interpreted
from tiny_models import tiny_module
from torch import Tensor

from outrider import load_model
from outrider.core.errors import OutriderWarning
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.kernels import build, is_exact
from outrider.runtime.prefill import unsampled_context

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


SIZES: dict[str, Any] = {"num_hidden_layers": 1, "intermediate_size": 96, "std": 0.1}


def quantized(kind: str, dtype: torch.dtype) -> HFModel:
    """A model of one layer, which a compiler is soon done with."""
    module = tiny_module(dtype=dtype, **SIZES)
    return load_model(module, quantized=kind)


@torch.inference_mode()
def last_logits(model: HFModel) -> Tensor:
    """Logits of a forward pass over six tokens after six others, (N, V)."""
    tokens = [7 * i % model.num_tokens for i in range(12)]
    context = unsampled_context(model, tokens)
    cache = model.start(unsampled_context(model, tokens[:7]))
    return model.extend(cache, context.tokens_BT[:, 6:])[0]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int4", torch.bfloat16),
        ("int8:32", torch.float32),
        ("int4+a8", torch.float32),
        ("int8:32+a8", torch.bfloat16),
    ],
)
def test_passes_are_exact(kind: str, dtype: torch.dtype) -> None:
    """Chains and trees, alone and in batches: eagerly, and by the program that would be compiled,
    run by torch."""
    target = quantized(kind, dtype)
    prepare(target, exact=True)
    assert is_exact(target.module)
    draft = near(dtype=dtype, **SIZES)
    assert_exact(target, draft)
    target.compiled = CompiledExecutor(target.module, target.spec, "exact", interpreted, exact=True)
    assert_exact(target, draft)
    assert not target.compiled.failed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8:32+a8"])
def test_compiled_passes_have_the_bits_of_eager_ones(
    kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    target = quantized(kind, torch.bfloat16)
    prepare(target, "auto", exact=True, own=True)
    compiled_NV = last_logits(target)
    assert target.compiled is not None
    assert not target.compiled.failed
    target.compiled = None
    assert torch.equal(compiled_NV, last_logits(target))
    assert not [each for each in recwarn if issubclass(each.category, OutriderWarning)]
