"""Models that cannot forget a draft, or be told positions, are refused by name and reason."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tiny_module
from transformers import PreTrainedModel

from outrider import load_model
from outrider.core.errors import UnsupportedModelError
from outrider.runtime import HFModel

_SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_key_value_heads": 1,
}
_MAMBA = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_T5 = {"vocab_size": 50, "d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8}
_FALCON = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_GPT_NEO = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def _build(model: str, config: str, settings: dict[str, object]) -> PreTrainedModel:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    module: PreTrainedModel = getattr(transformers, model)(
        getattr(transformers, config)(**settings | special)
    )
    return module


@pytest.mark.parametrize(
    ("model", "config", "settings", "reasons"),
    [
        ("MambaForCausalLM", "MambaConfig", _MAMBA, ["recurrent layers", "load_model"]),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            _SMALL | _MIXED,
            ["layers 0, 2 are", "linear_attention", "mamba2, nemotron_h"],
        ),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            _SMALL | {"layer_types": ["chunked_attention", "full_attention", "full_attention"]},
            ["layers 0 are", "own chunk of positions"],
        ),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            _SMALL | {"layer_types": ["indexed_attention", "full_attention", "full_attention"]},
            ["layers 0 are", "indexer keeps keys of its own"],
        ),
        ("T5ForConditionalGeneration", "T5Config", _T5, ["encoder-decoder", "load_model"]),
        (
            "BloomForCausalLM",
            "BloomConfig",
            {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2},
            ["position_ids"],
        ),
        (
            "MptForCausalLM",
            "MptConfig",
            {"vocab_size": 50, "d_model": 16, "n_layers": 2, "n_heads": 2},
            ["position_ids"],
        ),
        ("FalconForCausalLM", "FalconConfig", _FALCON | {"alibi": True}, ["ALiBi"]),
        (
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            _GPT_NEO | {"attention_types": [[["global", "local"], 1]], "window_size": 8},
            ["mask of its own"],
        ),
        (
            "OpenAIGPTLMHeadModel",
            "OpenAIGPTConfig",
            {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2},
            ["past_key_values"],
        ),
    ],
)
def test_refused_with_layers_and_reason(
    model: str, config: str, settings: dict[str, object], reasons: list[str]
) -> None:
    module = _build(model, config, settings)
    with pytest.raises(UnsupportedModelError) as caught:
        HFModel(module, name="target here")
    message = str(caught.value)
    assert message.startswith(f"target here ({model})")
    for reason in reasons:
        assert reason in message
    assert "\n" not in message


def test_many_layers_are_abridged() -> None:
    module = tiny_module("llama", num_hidden_layers=2)
    module.config.layer_types = ["linear_attention"] * 40
    with pytest.raises(UnsupportedModelError, match=r"0, 1, 2, 3, 4, 5, 6, 7, … \(40 in all\)"):
        HFModel(module)


@pytest.mark.parametrize(
    ("model", "config", "settings", "reason"),
    [
        ("LlamaForCausalLM", "LlamaConfig", _SMALL | _MIXED, "layers 0, 2"),
        ("LongT5ForConditionalGeneration", "LongT5Config", _T5, "encoder-decoder of type longt5"),
    ],
)
def test_a_folder_is_refused_before_its_weights_are_read(
    tmp_path: Path, model: str, config: str, settings: dict[str, object], reason: str
) -> None:
    _build(model, config, settings).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path, dtype="float32", device="cpu")


def test_evaluation_mode() -> None:
    module = tiny_module().train()
    assert not HFModel(module).module.training
    assert torch.is_grad_enabled()
