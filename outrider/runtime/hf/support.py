"""Which decoders can be rolled back and told their positions, and what their layers attend to."""

import inspect
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from outrider.core.errors import UnsupportedModelError

_ATTENTION = {"full_attention", "sliding_attention"}
_STATEFUL = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
"""The supported families with recurrent layers (``recurrent.py``), by ``model_type``."""

_WEIGHTS_READ = {
    "falcon_mamba": ("dt_proj", "lm_head"),
    "jamba": ("dt_proj",),
    "mamba": ("dt_proj", "lm_head"),
    "mamba2": ("lm_head",),
    "rwkv": ("attention.output", "feed_forward.value"),
    "xlstm": ("lm_head",),
}
"""Linear layers whose weights the code of a family reads itself, by ``model_type``: to multiply or
divide them, or to convert what enters the layer to their dtype."""

_NO_MASKS = (
    "for which there are no masks and KV buffers here; use a model with full or sliding attention "
    "only"
)
_REASONS = {
    "chunked_attention": "whose tokens attend to their own chunk of positions only, for which no "
    "masks are made here; its layers without rotary positions scale queries by one length for the "
    "whole batch, while rows of a ragged batch differ; use another model",
    "indexed_attention": "whose indexer keeps keys of its own and chooses the slots that a token "
    "attends to, so that logits depend on more than masks and KV buffers; use another model",
}
"""Why a kind of attention layer is not supported."""

_REFUSED = {
    "minimax": "takes no cache but one of its own class, which cannot be rolled back",
    "moshi": "cuts its cache to a sliding window that its mask ignores, so that its logits depend "
    "on how a prompt is split among forward passes",
}
_RENAMED = {"attention": "full_attention", "recurrent": "linear_attention"}


def check_supported(module: PreTrainedModel, name: str) -> None:
    """Raises UnsupportedModelError for a model that cannot be rolled back, told its positions or
    given a mask."""
    kind = type(module).__name__
    check_config(module.config, kind, name)
    check_head(module, name)
    check_attention(module.config, kind, name)
    for needed in ("position_ids", "past_key_values"):
        if needed not in inspect.signature(module.forward).parameters:
            raise UnsupportedModelError(
                f"{name} ({kind}) takes no explicit {needed}, which ragged batches and trees need"
            )


def is_recurrent(config: PretrainedConfig) -> bool:
    """Whether a model is of a supported family with recurrent layers. Some models of such a family,
    like Granite 4's dense ones, have attention layers only."""
    text = config.get_text_config()
    if text.model_type == "granitemoehybrid" and set(text.layer_types) <= {
        "attention",
        "full_attention",
    }:
        return False
    return text.model_type in RECURRENT


def reads_weight(config: PretrainedConfig, path: str) -> bool:
    """Whether a model's own code reads the weight of the linear layer at a path, so that the weight
    must stay in the model's dtype and layout."""
    names = _WEIGHTS_READ.get(config.get_text_config().model_type, ())
    return any(f".{path}".endswith(f".{name}") for name in names)


def check_head(module: PreTrainedModel, name: str) -> None:
    """Raises UnsupportedModelError for a model without a language-modelling head."""
    if not module.can_generate() and module.get_output_embeddings() is None:
        auto = (
            "AutoModelForSeq2SeqLM" if module.config.is_encoder_decoder else "AutoModelForCausalLM"
        )
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}) has no language-modelling head: load it with {auto}"
        )


def check_config(config: PretrainedConfig, kind: str, name: str) -> None:
    """The part of :func:`check_supported` that needs no weights."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} ({kind}) is an encoder-decoder: use load_model")
    if is_recurrent(config):
        raise UnsupportedModelError(f"{name} ({kind}) has recurrent layers: use load_model")
    if getattr(config, "alibi", False) or config.model_type == "gpt_neo":
        raise UnsupportedModelError(
            f"{name} ({kind}) places tokens by their slot in the cache (ALiBi or a mask of its "
            f"own), not by position_ids, which ragged batches and trees need"
        )
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    of_kinds = [layer for layer, each in rope.items() if isinstance(each, dict)]
    if any(rope[layer].get("rope_type") == "longrope" for layer in of_kinds):
        raise UnsupportedModelError(
            f"{name} ({kind}) has LongRoPE in some kinds of layers ({', '.join(of_kinds)}), which "
            f"is supported only where all layers have the same factors; take another model"
        )
    types = _layer_types(config.get_text_config())
    odd = sorted(set(types) - _ATTENTION)
    if odd:
        reason = next((why for kind_, why in _REASONS.items() if kind_ in odd), _NO_MASKS)
        if _STATEFUL.intersection(odd):
            reason = (
                f"whose state cannot forget a rejected draft; supported recurrent models are of "
                f"the types {', '.join(sorted(RECURRENT))}"
            )
        raise UnsupportedModelError(
            f"{name} ({kind}) cannot be rolled back: layers "
            f"{_ranges([i for i, t in enumerate(types) if t in odd])} are of type "
            f"{', '.join(odd)}, {reason}"
        )
    if config.model_type == "xmod" and config.default_language is None:
        raise UnsupportedModelError(
            f"{name} ({kind}) has no language: call its set_default_language with one of "
            f"{', '.join(config.languages)} first"
        )
    refused = _REFUSED.get(config.get_text_config().model_type)
    if refused is not None:
        raise UnsupportedModelError(f"{name} ({kind}) {refused}; use another model")


def check_attention(config: PretrainedConfig, kind: str, name: str) -> None:
    """Raises UnsupportedModelError for an attention implementation that reads no dense mask."""
    used = attention_of(config)
    if not takes_masks(used):
        raise UnsupportedModelError(
            f"{name} ({kind}) has attn_implementation={used!r}, which reads no dense mask, as "
            f"ragged batches and trees need: load it with attn_implementation='sdpa' or 'eager'"
        )


def attention_of(config: PretrainedConfig) -> str | None:
    """The attention implementation of a text model; None until ``transformers`` has chosen one."""
    used: str | None = config.get_text_config()._attn_implementation
    return used


def takes_masks(attention: str | None) -> bool:
    """Whether an attention implementation reads a dense mask, of every query token and slot. Names
    with a slash are kernels from the hub, variants of flash attention."""
    if attention is None:
        return True
    return not (attention.startswith(("flex_", "flash_", "paged|")) or "/" in attention)


def declared_types(config: Any) -> list[str]:
    """The kind of each layer, where the configuration tells; else no kinds."""
    for name in ("layer_types", "layers_block_type"):  # the second: older transformers
        if types := getattr(config, name, None):
            return [_RENAMED.get(kind, kind) for kind in types]
    return []


def _layer_types(config: Any) -> list[str]:
    if types := declared_types(config):
        return types
    sliding = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers


def windows_of(config: Any) -> dict[str, int | None]:
    """Sliding window of each kind of layer; None where layers attend to all positions."""
    window = getattr(config, "sliding_window", None)
    return {
        kind: window if kind == "sliding_attention" else None
        for kind in sorted(set(_layer_types(config)))
    }


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f", … ({len(numbers)} in all)" if len(numbers) > 8 else "")
