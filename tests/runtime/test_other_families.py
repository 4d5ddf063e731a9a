"""Families with peculiarities: equal to `generate`, or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    VOCAB,
    byte_tokenizer,
    engine_of,
    greedy,
    hf_generate,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)
from tiny_seq2seq import tiny_seq2seq_module
from transformers import PreTrainedModel

from outrider import load_model
from outrider.core.errors import UnsupportedModelError
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.runtime.hf.seq2seq import Seq2SeqModel

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GRANITE = {
    "layer_types": ["attention", "attention"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
}
_CHAMELEON = {
    "vocabulary_map": {"<image>": 4} | {f"IMGIMGA{chr(65 + i)}Z": 10 + i for i in range(8)},
    "vq_config": {
        "embed_dim": 8,
        "num_embeddings": 8,
        "latent_channels": 8,
        "base_channels": 32,
        "channel_multiplier": [1],
        "num_res_blocks": 1,
        "resolution": 16,
    },
}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
_GEMMA3N = _SHARED | {"laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None}


def _build(model: str, config: str, settings: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    module: PreTrainedModel = getattr(transformers, model)(
        getattr(transformers, config)(**_SMALL | settings)
    )
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return module.eval()


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _GRANITE),
        ("ChameleonForConditionalGeneration", "ChameleonConfig", _CHAMELEON),
    ],
)
def test_equal_to_generate(model: str, config: str, settings: dict[str, Any]) -> None:
    module = _build(model, config, settings)
    prompts = ragged_prompts([19, 6])
    expected = [hf_generate(module, prompt, 12) for prompt in prompts]
    for draft, method in ((None, "plain"), (HFModel(module), "speculative"), (None, "early-exit")):
        engine = engine_of(HFModel(module), draft, method)
        assert token_ids(engine.generate(prompts, greedy(12))) == expected


@pytest.mark.parametrize(
    ("model", "config", "settings", "reason"),
    [
        ("Gemma3nForCausalLM", "Gemma3nTextConfig", _GEMMA3N, r"pass on \(2, 1, 4, 32\) numbers"),
        ("Gemma4ForCausalLM", "Gemma4TextConfig", _SHARED, "KeyError: 'sliding_attention'"),
    ],
)
def test_layers_that_cannot_exit_early_are_refused(
    model: str, config: str, settings: dict[str, Any], reason: str
) -> None:
    """They hand on several hidden states, or keys and values, and are right without that method."""
    target = HFModel(_build(model, config, settings), name="target")
    with pytest.raises(UnsupportedModelError, match=rf"target \({model}\) cannot .*{reason}"):
        EarlyExit(target, 2)
    prompts = ragged_prompts([11, 4])
    expected = [hf_generate(target.module, prompt, 6) for prompt in prompts]
    assert token_ids(engine_of(target).generate(prompts, greedy(6))) == expected


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2", "paged|sdpa", "a/b"])
def test_attention_without_masks_is_refused(attention: str) -> None:
    """What calls it, models with an encoder among them."""
    for module, adapter in ((tiny_module(), HFModel), (tiny_seq2seq_module(), Seq2SeqModel)):
        module.config._attn_implementation = attention
        with pytest.raises(UnsupportedModelError) as caught:
            adapter(module, name="target")
        message = str(caught.value)
        assert f"attn_implementation={attention!r}" in message
        assert "attn_implementation='sdpa'" in message


def test_a_folder_that_asks_for_flex_attention_is_loaded_with_masks(tmp_path: Path) -> None:
    module = tiny_module("llama", vocab_size=280)
    module.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    flex = config.replace("{", '{"attn_implementation": "flex_attention", ', 1)
    (tmp_path / "config.json").write_text(flex)
    target = load_model(tmp_path, dtype="float32", device="cpu")
    assert target.module.config._attn_implementation == "sdpa"
    prompts = ragged_prompts([7])
    expected = [hf_generate(module, prompt, 6) for prompt in prompts]
    assert token_ids(engine_of(target).generate(prompts, greedy(6))) == expected


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("minimax", "cache but one of its own class"), ("moshi", "sliding window that its mask")],
)
def test_decoders_are_refused_by_name(model_type: str, reason: str) -> None:
    module = tiny().module
    module.config.model_type = model_type
    with pytest.raises(UnsupportedModelError, match=reason):
        HFModel(module)


def test_xmod_needs_a_language() -> None:
    config = transformers.XmodConfig(**_SMALL | {"is_decoder": True, "pad_token_id": 1})
    module = transformers.XmodForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="no language: call its set_default_language"):
        HFModel(module)
    module.set_default_language("en_XX")
    results = engine_of(HFModel(module)).generate(ragged_prompts([5]), greedy(3))
    assert token_ids(results) == [hf_generate(module, ragged_prompts([5])[0], 3)]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("m2m_100", "leaving out padding"),
        ("led", "no mask either for a single token"),
        ("umt5", "each of whose layers computes a position bias"),
        ("switch_transformers", "capacity that is counted per forward pass"),
        ("nllb-moe", "capacity that is counted per forward pass"),
        ("longt5", "cannot be given positions per row"),
    ],
)
def test_encoder_decoders_are_refused_with_the_reason(model_type: str, reason: str) -> None:
    module = tiny_seq2seq_module()
    module.config.model_type = model_type
    with pytest.raises(UnsupportedModelError, match=rf"of type {model_type}, .*{reason}.*bart"):
        Seq2SeqModel(module)
