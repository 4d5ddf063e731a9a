"""Logits that a model masks are healthy; NaN, +inf and positions without any token are not."""

import math

import pytest
import torch
from interpreted_graphs import interpreted
from tiny_models import engine_of, greedy, hf_generate, ragged_prompts, tiny_module, token_ids
from torch import Tensor, nn

from outrider import Sampling
from outrider.core.errors import NonFiniteLogitsError
from outrider.core.health import deviation, health_of
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor

INF = math.inf
LEAST = torch.finfo(torch.float32).min
NUM = 12


class MaskingHead(nn.Linear):
    """A head that forbids the first half of its tokens, as Chameleon forbids those of images."""

    value = -INF

    def forward(self, hidden: Tensor) -> Tensor:
        forbidden = torch.arange(self.out_features) < self.out_features // 2
        return super().forward(hidden).masked_fill(forbidden, self.value)


def masking(value: float, seed: int = 0) -> HFModel:
    module = tiny_module("llama", seed, std=0.05)
    module.lm_head.__class__ = MaskingHead
    module.lm_head.value = value
    return HFModel(module, name="target")


@pytest.mark.parametrize("value", [-INF, LEAST])
@pytest.mark.parametrize("method", ["plain", "speculative", "sequoia", "early-exit"])
def test_masked_tokens_are_no_damage(method: str, value: float) -> None:
    target, prompts = masking(value), ragged_prompts([3, 11])
    expected = [hf_generate(target.module, prompt, NUM) for prompt in prompts]
    assert min(map(min, expected)) >= target.num_tokens // 2
    engine = engine_of(target, masking(value, seed=1), method)
    assert token_ids(engine.generate(prompts, greedy(NUM))) == expected
    sampled = engine.generate(prompts, Sampling(max_new_tokens=NUM, seed=3, ignore_eos=True))
    assert min(map(min, token_ids(sampled))) >= target.num_tokens // 2


@pytest.mark.parametrize("value", [math.nan, INF])
def test_damage_beside_masked_tokens_is_found(value: float) -> None:
    target = masking(-INF)
    with torch.no_grad():
        target.module.lm_head.weight[-1] = value
    with pytest.raises(NonFiniteLogitsError, match="target produced NaN or infinite logits"):
        engine_of(target).generate([[1, 2]], greedy(4))


def test_a_graph_takes_masked_tokens_for_healthy() -> None:
    target, prompts = masking(LEAST), ragged_prompts([3, 11])
    expected = token_ids(engine_of(target).generate(prompts, greedy(NUM)))
    target.compiled = CompiledExecutor(target.module, target.spec, "graph", interpreted)
    assert token_ids(engine_of(target).generate(prompts, greedy(NUM))) == expected
    assert not target.compiled.failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_health_by_row(dtype: torch.dtype) -> None:
    logits_BNV = torch.zeros(7, 3, 70, dtype=dtype)  # wider than a vector
    least = torch.finfo(dtype).min
    logits_BNV[1, :, 1:] = -INF
    logits_BNV[2, :, 1:] = least
    logits_BNV[3, 1, 65] = math.nan
    logits_BNV[4, 1, 3] = INF
    logits_BNV[5, 1] = -INF
    logits_BNV[6, 0], logits_BNV[6, 1, 2] = -INF, INF
    healthy = [True, True, True, False, False, False, False]
    assert health_of(logits_BNV).isfinite().tolist() == healthy


def test_deviation_is_of_unmasked_logits() -> None:
    wanted = torch.tensor([1.0, -3.0, -INF, LEAST])
    assert deviation(torch.tensor([1.5, -3.0, -INF, LEAST]), wanted) == (0.5, 3.0)
    assert deviation(torch.tensor([1.5, -3.0, 0.0, LEAST]), wanted)[0] == INF
    assert math.isnan(deviation(torch.tensor([math.nan, -3.0, -INF, LEAST]), wanted)[0])
