"""LongRoPE: every row has the factors that its own length asks for, as `generate` for it alone."""

from typing import Any

import pytest
import torch
import transformers
from interpreted_graphs import interpreted
from tiny_models import (
    VOCAB,
    engine_of,
    full_logits,
    greedy,
    hf_generate,
    ragged_prompts,
    tiny_module,
    token_ids,
    uniform_method,
)
from transformers import PreTrainedModel

from outrider import Engine
from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.drafters.search.beam_search import beam_search
from outrider.runtime import HFModel, prefill
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.hf.early_exit import EarlyExit

ORIGINAL = 24
LENGTHS = [3, 20, 24, 25, 40]  # stays short, crosses, crosses at once, long from the start (2)
NUM = 12
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [3.0, 5.0, 8.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "original_max_position_embeddings": ORIGINAL,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_PHIMOE = {
    "rope_parameters": _LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.6},
    "num_local_experts": 2,
}


def _longrope(family: str = "Phi3", seed: int = 0, **settings: Any) -> PreTrainedModel:
    settings = _SIZES | {"rope_parameters": dict(_LONGROPE)} | settings
    config = getattr(transformers, f"{family}Config")(**settings)
    module: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.fixture(scope="module", params=["Phi3", "Phimoe"])
def module(request: pytest.FixtureRequest) -> PreTrainedModel:
    return _longrope(request.param, **(_PHIMOE if request.param == "Phimoe" else {}))


@pytest.fixture(scope="module")
def expected(module: PreTrainedModel) -> list[tuple[int, ...]]:
    """What ``transformers`` continues each prompt with, alone."""
    return [hf_generate(module, prompt, NUM) for prompt in ragged_prompts(LENGTHS)]


def test_factors_matter(module: PreTrainedModel) -> None:
    """The same tokens with short and with long factors have other logits."""
    tokens = ragged_prompts([ORIGINAL + 1])[0]
    long_TV, short_TV = full_logits(module, tokens), full_logits(module, tokens[:-1])
    assert (long_TV[-2] - short_TV[-1]).abs().max() > 0.1


@pytest.mark.parametrize("max_batch_size", [1, 2, 5])
def test_a_ragged_batch_equals_generate(
    module: PreTrainedModel, expected: list[tuple[int, ...]], max_batch_size: int
) -> None:
    """With two rows at a time, rows join others that are on the other side of the boundary."""
    engine = engine_of(HFModel(module), max_batch_size=max_batch_size)
    assert token_ids(engine.generate(ragged_prompts(LENGTHS), greedy(NUM))) == expected


@pytest.mark.parametrize("quality", ["good", "bad", "tree", "staged"])
def test_speculation_across_the_boundary_equals_generate(
    module: PreTrainedModel, expected: list[tuple[int, ...]], quality: str
) -> None:
    target = HFModel(module)
    if quality == "tree":
        engine = engine_of(target, None, uniform_method(width=3), γ=12)
    else:
        draft = HFModel(_longrope(seed=1) if quality == "bad" else module)
        engine = engine_of(target, draft, "staged" if quality == "staged" else None, γ=5)
    results = engine.generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected
    if quality == "good":
        assert results.stats.acceptance_rate > 0.9  # the draft's factors change with the target's


def test_narrow_prefill_passes_equal_generate(
    module: PreTrainedModel, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tokens of a long prompt have long factors, too."""
    monkeypatch.setattr(prefill, "PREFILL_WIDTH", 7)
    results = engine_of(HFModel(module)).generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected


def test_reused_prefixes_have_the_factors_of_the_new_sequence(module: PreTrainedModel) -> None:
    """What a short sequence left is of no use to a long one, nor the other way round."""
    engine = engine_of(HFModel(module), prefix_cache="1GB")
    prompt, reused = ragged_prompts([60])[0], []
    for length in (20, 22, 40, 44, 21):
        found = engine.generate([prompt[:length]], greedy(1))[0]
        assert found.token_ids == hf_generate(module, prompt[:length], 1)
        reused.append(found.stats.reused)
    assert reused == [0, 20, 0, 40, 20]


def test_other_families_equal_generate_without_a_cache() -> None:
    """Llama's ``generate`` keeps the keys of short factors beyond the boundary; without a cache it
    computes what Phi-3's does."""
    module = _longrope("Llama")
    prompts = ragged_prompts(LENGTHS)
    expected = [hf_generate(module, prompt, NUM, use_cache=False) for prompt in prompts]
    assert token_ids(engine_of(HFModel(module)).generate(prompts, greedy(NUM))) == expected


def test_the_users_model_stays_as_it_is() -> None:
    module = _longrope()
    names = [name for name, _ in module.named_modules()]
    prompts = ragged_prompts(LENGTHS)
    before = [hf_generate(module, prompt, NUM) for prompt in prompts]
    target = HFModel(module)
    engine_of(target).generate(prompts, greedy(NUM))
    assert target.module is module
    assert [name for name, _ in module.named_modules()] == names
    assert [hf_generate(module, prompt, NUM) for prompt in prompts] == before
    shared = {id(weight) for weight in module.parameters()}
    assert {id(weight) for weight in target.eager.module.parameters()} == shared


def test_a_graph_takes_the_factors_of_each_row() -> None:
    """Phi-3's forward pass as one program, which is given the positions."""
    module, prompts = _longrope(), ragged_prompts(LENGTHS)
    target = HFModel(module)
    target.compiled = CompiledExecutor(target.eager.module, target.spec, "graph", interpreted)
    for draft in (None, target):
        results = engine_of(target, draft).generate(prompts, greedy(NUM))
        assert token_ids(results) == [hf_generate(module, prompt, NUM) for prompt in prompts]
    assert target.compiled._programs
    assert not target.compiled.failed


def test_int8_caches_are_recomputed(module: PreTrainedModel) -> None:
    """Rows alone and together, with quantised keys and values."""
    prompts = ragged_prompts(LENGTHS)
    engine: Engine = engine_of(HFModel(module), kv_dtype="int8")
    alone = [token_ids(engine.generate([prompt], greedy(NUM)))[0] for prompt in prompts]
    assert token_ids(engine.generate(prompts, greedy(NUM))) == alone


def test_what_cannot_follow_the_boundary_is_refused() -> None:
    target = HFModel(_longrope(), name="target")
    with pytest.raises(UnsupportedModelError, match=f"LongRoPE.*{ORIGINAL}"):
        EarlyExit(target, 1)
    with pytest.raises(InvalidParameterError, match=f"max_new_tokens=9: .*{ORIGINAL}"):
        beam_search(target, ragged_prompts([20])[0], 2, 9)
    assert len(beam_search(target, ragged_prompts([20])[0], 2, 5)[0].token_ids) == 5


def test_factors_of_some_layers_are_refused() -> None:
    module = tiny_module("gemma3")
    module.config.rope_parameters["full_attention"] = dict(_LONGROPE)
    with pytest.raises(UnsupportedModelError, match=r"LongRoPE in some kinds of layers.*full_att"):
        HFModel(module)


def test_a_wrapped_forward_is_refused() -> None:
    module = _longrope()
    module.forward = module.forward  # as hooks of accelerate do
    with pytest.raises(UnsupportedModelError, match=r"LongRoPE.*wrapper"):
        HFModel(module)


def test_dynamic_ntk_within_the_context_equals_generate() -> None:
    """Its factors change beyond the context only, which no row reaches, whatever ran before."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    module = tiny_module("llama", max_position_embeddings=40, rope_parameters=rope)
    prompts = ragged_prompts([25, 3, 14])
    expected = [hf_generate(module, prompt, 15) for prompt in prompts]
    hf_generate(module, prompts[0], 60)
    for draft in (None, HFModel(module)):
        results = engine_of(HFModel(module), draft).generate(prompts, greedy(15))
        assert token_ids(results) == expected
