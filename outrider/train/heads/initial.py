"""What a head in training begins with: the shape and the weights of its target, where they fit.

Legend: D draft vocabulary, H width, E width of the layers read side by side.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.eagle3_network import FirstLayer
from outrider.runtime import HFModel

_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that multiply by their weight, as a head's does; Gemma's multiply by 1 + weight."""
OUTPUT_SCALE = 0.3
"""Of a new output layer. After 80 steps of AdamW on 16 thousand tokens, an EAGLE-3 head for
SmolLM2-135M-Instruct has α of 0.21 and 0.17 at its first two positions; with 1, 0.19 and 0.12;
with 0.1, 0.18 and 0.15."""
_NORM = "input_layernorm"
_SAME = (
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
_WIDE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def layer_shape(target: HFModel, intermediate_size: int = 0) -> dict[str, Any]:
    """The arguments by which a ``transformers`` configuration describes layers of the target's
    shape.

    Args:
        target: the model. Rotary embeddings that are scaled by its length are not taken over.
        intermediate_size: of the layers' MLP; 0 takes the target's.
    """
    text: Any = target.module.config.get_text_config()
    heads = text.num_attention_heads
    rope = copy.deepcopy(getattr(text, "rope_parameters", None))
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": intermediate_size or text.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", heads),
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-5),
        "rope_parameters": rope,
        "max_position_embeddings": text.max_position_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def rarest_token(counts_V: Tensor) -> int:
    """A token that the data hardly has, whose embedding can stand for tokens to be drafted."""
    return int((counts_V == counts_V.min()).nonzero()[-1])


@torch.no_grad()
def copy_output_layer(output: nn.Linear, rows_DH: Tensor) -> None:
    """Copies the target's rows of the drafted tokens, flattened: the feature begins as a hidden
    state that predicts the token before the one that is drafted, and should not insist on it.

    Args:
        output: the head's output layer.
        rows_DH: of the target's output layer.
    """
    output.weight.copy_(OUTPUT_SCALE * rows_DH)


@torch.no_grad()
def copy_final_norm(norm: nn.Module, target: HFModel) -> None:
    """Copies the weight of the target's final norm, if both norms compute the same."""
    final: Any = getattr(target.module.get_decoder(), "norm", None)
    own: Any = norm.weight
    if type(final).__name__ in _PLAIN_NORMS and final.weight.shape == own.shape:
        own.copy_(final.weight)


@torch.no_grad()
def read_last_layer(fc: nn.Linear) -> None:
    """Adds the identity to the part of ``fc``, (H, E), that reads the last of the layers, so that
    what it returns begins as the hidden state of that layer."""
    H = fc.out_features
    fc.weight[:, -H:] += torch.eye(H)


@torch.no_grad()
def copy_layer(layer: FirstLayer, target: HFModel, number: int) -> None:
    """Copies a layer of the target, which then reads the feature. What reads the embedding keeps
    its weights.

    The target's norm in front of the attention becomes part of the projections after it, since
    the head may add what its own norm returns (``norm_before_residual``).

    Args:
        layer: of the head.
        target: the model.
        number: of its layer, from 1.

    Raises:
        InvalidParameterError: the target has no such layer, or one of another kind or shape.
    """
    if not 1 <= number <= target.num_layers:
        raise InvalidParameterError(
            f"from_layer={number}: {target.name} has layers 1 to {target.num_layers}"
        )
    decoder: Any = target.module.get_decoder()
    source: nn.Module = decoder.layers[number - 1]
    own, theirs = dict(layer.named_parameters()), dict(source.named_parameters())
    if not _fits(own, theirs) or type(source.get_submodule(_NORM)).__name__ not in _PLAIN_NORMS:
        raise InvalidParameterError(
            f"from_layer={number}: the layers of {target.name} are of another kind or size than "
            f"the head's: leave from_layer at 0"
        )
    for name in _SAME:
        own[name].copy_(theirs[name])
    for name in _WIDE:
        own[name][:, -theirs[name].shape[1] :] = theirs[name] * theirs[f"{_NORM}.weight"]


def _fits(own: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> bool:
    """Whether a layer of the target has the parameters that a head's needs, in the same shapes."""
    if not {*_SAME, *_WIDE, f"{_NORM}.weight"} <= theirs.keys():
        return False
    same = all(own[name].shape == theirs[name].shape for name in _SAME)
    return same and all(len(own[name]) == len(theirs[name]) for name in _WIDE)
