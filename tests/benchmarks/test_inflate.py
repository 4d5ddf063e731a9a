"""Inflation preserves logits, greedy outputs and acceptance, and rejects other architectures."""

from typing import Any

import pytest
import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny_module, token_ids

from benchmarks.inflate import Shape, inflate
from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.runtime import HFModel

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "large epsilon": {"rms_norm_eps": 0.3},
}


def larger(module: Any) -> Shape:
    config = module.config
    return Shape(
        config.hidden_size * 3 + 8,
        config.num_hidden_layers + 2,
        config.num_key_value_heads * 2 + 1,
        config.intermediate_size + 40,
    )


@pytest.mark.parametrize("case", SETTINGS)
def test_logits_do_not_change(case: str) -> None:
    """Within 1e-5 of the largest, in float32; norms and biases have random values, not the initial
    ones."""
    module = tiny_module(**SETTINGS[case])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    new = inflate(module, larger(module))
    tokens = list(range(3, 40))
    mine, theirs = full_logits(module, tokens), full_logits(new, tokens)
    assert float((mine - theirs).abs().max()) <= 1e-5 * float(mine.abs().max())
    assert sum(p.numel() for p in new.parameters()) > 3 * sum(
        p.numel() for p in module.parameters()
    )


def test_outputs_and_acceptance_do_not_change() -> None:
    module = tiny_module(dtype=torch.float64)
    draft = HFModel(tiny_module(seed=3, dtype=torch.float64))
    target, new = HFModel(module), HFModel(inflate(module, larger(module)))
    prompts = ragged_prompts([4, 7])
    one, other = (engine_of(t, draft, γ=3).generate(prompts, greedy(16)) for t in (target, new))
    assert token_ids(one) == token_ids(other)
    assert one.stats.accepted == other.stats.accepted


def test_new_parameters_are_not_all_zeros() -> None:
    """Zeros might be computed faster: new heads, MLP channels and layers are random."""
    module = tiny_module()
    new = inflate(module, larger(module)).requires_grad_(False)
    assert bool(new.model.layers[-1].mlp.up_proj.weight.all())
    assert bool(new.model.layers[0].self_attn.q_proj.weight[-1].all())


def test_shrinking_and_other_architectures_are_errors() -> None:
    module = tiny_module()
    with pytest.raises(InvalidParameterError, match="hidden_size=8: the model has"):
        inflate(module, Shape(8, 9, 9, 999))
    with pytest.raises(UnsupportedModelError, match="only LlamaForCausalLM"):
        inflate(tiny_module("gpt2"), Shape(999, 9, 9, 999))
