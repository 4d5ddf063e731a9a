"""Norms that one kernel computes: which are replaced, and that models compute the same."""

import copy

import pytest
import torch
from tiny_models import FAMILIES, full_logits, with_various_norms
from torch import nn
from torch.nn import functional

from outrider.runtime.kernels.fused_norms import use_fused_norms

HAVE_NORMS = {"llama": 5, "qwen3": 9, "mistral": 5, "mixtral": 5}
"""Families whose norms compute the formula, and how many norms a model of two layers has."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same_with_fused_norms(family: str, dtype: torch.dtype) -> None:
    module = with_various_norms(family, dtype)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    wanted_TV = full_logits(module, tokens).double()
    assert use_fused_norms(module) == HAVE_NORMS.get(family, 0)
    error_TV = full_logits(module, tokens).double() - wanted_TV
    allowed = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    assert float(error_TV.norm() / wanted_TV.norm()) < allowed


def test_norms_of_models_in_float64_stay() -> None:
    """They compute in float32."""
    assert use_fused_norms(with_various_norms("llama", torch.float64)) == 0


@torch.no_grad()
def test_a_copy_reads_its_own_weights() -> None:
    module = with_various_norms("llama", torch.float32)
    use_fused_norms(module)
    twin = copy.deepcopy(module)
    norm, other = module.model.norm, twin.model.norm
    x_NH = torch.randn(3, norm.weight.shape[0])
    before_NH = norm(x_NH)
    other.weight.mul_(2)
    assert torch.equal(norm(x_NH), before_NH)
    assert torch.equal(other(x_NH), 2 * before_NH)


class OneMoreRMSNorm(nn.Module):
    """Gemma's: the weight is added to one."""

    def __init__(self, added: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.2, 0.3, 8))
        self.eps = 1e-6
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (8,), self.added + self.weight, self.eps)


@pytest.mark.parametrize(("added", "wanted"), [(0.0, 1), (1.0, 0), (0.001, 0)])
def test_norms_of_another_formula_stay(added: float, wanted: int) -> None:
    assert use_fused_norms(nn.Sequential(OneMoreRMSNorm(added), nn.LayerNorm(8))) == wanted
