"""The numbers of a model that determine its cost: weights, operations, KV cache.

A model is named by its parameters (``70B``), or read from its ``config.json``. Of a model that is
only a number, layers and widths are those of the nearest of the Llama 3 and SmolLM2 models.

Latent attention (DeepSeek-AI 2024, DeepSeek-V2, https://arxiv.org/abs/2405.04434) keeps one
compressed vector per token and layer for the keys and values of all heads, and one key of the
rotary part that all heads share. Queries are multiplied with the compressed vectors themselves.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.experts import experts_touched

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NAME = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT])", re.IGNORECASE)
_SHAPES = (  # parameters, layers, width, key-value width, key-value heads
    (0.135e9, 30, 576, 192, 3),
    (1.24e9, 16, 2048, 512, 8),
    (3.2e9, 28, 3072, 1024, 8),
    (8.0e9, 32, 4096, 1024, 8),
    (70.6e9, 80, 8192, 1024, 8),
    (405.9e9, 126, 16384, 1024, 8),
)
_GATED = 3  # matrices of a feed-forward network with a gate


@dataclass(frozen=True)
class ModelSize:
    """What a decoder costs.

    Attributes:
        name: on the plan.
        shared: parameters that every token reads.
        layers: number of decoder layers.
        width: of the hidden states.
        cache_width: numbers that a layer keeps of a token: its keys and values, or what they are
            computed from.
        kv_heads: key-value heads; with more GPUs than that, heads are stored more than once.
        attended: operations of a layer per token and attended position.
        expert: parameters of one expert in all layers; 0 for a dense model.
        num_experts, per_token: experts per layer, and those that a token is routed to.
        weight_bytes: bytes per parameter.
        kv_bytes: bytes per number in the KV cache.
    """

    name: str
    shared: float
    layers: int
    width: int
    cache_width: int
    kv_heads: int
    attended: int
    expert: float = 0.0
    num_experts: int = 1
    per_token: int = 1
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.shared + self.expert * self.num_experts

    @property
    def num_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.weight_bytes

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that a pass over this many tokens reads; experts that no token is
        routed to are not read."""
        if not self.expert:
            return self.num_bytes
        touched = experts_touched(self.num_experts, self.per_token, max(1, round(tokens)))
        return (self.shared + self.expert * touched) * self.weight_bytes

    def operations(self, tokens: float, context: float) -> float:
        """Operations of a pass: two per weight and token, and those of attention."""
        active = self.shared + self.expert * self.per_token
        return tokens * (2 * active + self.layers * self.attended * context)

    def cache_bytes(self, tokens: float, degree: int = 1) -> float:
        """Bytes of the KV cache of this many tokens on one of ``degree`` GPUs."""
        share = 1 / min(degree, self.kv_heads)  # a key-value head is never divided
        return self.layers * self.cache_width * self.kv_bytes * tokens * share


def model_size(name: str, weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> ModelSize:
    """The size of a model.

    Args:
        name: a number of parameters such as ``70B`` or ``135M``, a ``config.json``, or a folder
            that holds one.
        weight_bytes: bytes per parameter.
        kv_bytes: bytes per number in the KV cache.

    Raises:
        InvalidParameterError: neither, or a configuration that is no decoder's.
    """
    match = _NAME.fullmatch(name.strip())
    if match is not None:
        parameters = float(match[1]) * _UNITS[match[2].upper()]
        if not parameters:
            raise InvalidParameterError(f"model {name!r}: has no parameters")
        return _like_known(name.strip(), parameters, weight_bytes, kv_bytes)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidParameterError(
            f"model {name!r}: must be a number of parameters such as 70B or 135M, or a folder with "
            f"a config.json; there is no file {file}"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidParameterError(f"model {name!r}: cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise InvalidParameterError(f"model {name!r}: {file} holds no JSON object")
    return _of_config(name, config.get("text_config") or config, weight_bytes, kv_bytes)


def _like_known(name: str, parameters: float, weight_bytes: float, kv_bytes: float) -> ModelSize:
    near = min(_SHAPES, key=lambda shape: abs(math.log(shape[0] / parameters)))
    _, layers, width, kv_width, kv_heads = near
    return ModelSize(
        name,
        parameters,
        layers,
        width,
        2 * kv_width,
        kv_heads,
        4 * width,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


class _Attention(NamedTuple):
    """The attention of a layer: its parameters, and the attributes of :class:`ModelSize`."""

    parameters: int
    cache_width: int
    kv_heads: int
    attended: int


class _FeedForward(NamedTuple):
    """The feed-forward networks of all layers: the parameters that every token reads, and the
    attributes of :class:`ModelSize`."""

    shared: int
    expert: int = 0
    num_experts: int = 1
    per_token: int = 1


def _of_config(
    name: str, config: Mapping[str, Any], weight_bytes: float, kv_bytes: float
) -> ModelSize:
    """Counts the weights of a Llama-like or DeepSeek-like decoder: attention, gated feed-forward
    networks or experts, two norms per layer, embeddings."""
    layers = _count(name, config, "num_hidden_layers")
    width = _count(name, config, "hidden_size")
    vocabulary = _count(name, config, "vocab_size")
    tables = 1 if config.get("tie_word_embeddings") else 2
    is_latent = bool(config.get("kv_lora_rank"))
    attention = (_latent_attention if is_latent else _attention)(name, config, width)
    shared, expert, num_experts, per_token = _feed_forward(name, config, layers, width)
    shared += layers * (attention.parameters + 2 * width) + width + tables * vocabulary * width
    return ModelSize(
        name,
        shared,
        layers,
        width,
        attention.cache_width,
        attention.kv_heads,
        attention.attended,
        expert,
        num_experts,
        per_token,
        weight_bytes,
        kv_bytes,
    )


def _attention(name: str, config: Mapping[str, Any], width: int) -> _Attention:
    """Heads with keys and values of their own, or of a group of heads. Biases are counted where the
    configuration names them: Llama's and Qwen3's of all projections, Qwen2's MoE's of three."""
    heads = _count(name, config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    parameters = 2 * width * head * (heads + kv_heads)
    if config.get("attention_bias") or config.get("qkv_bias"):
        parameters += (heads + 2 * kv_heads) * head
    if config.get("attention_bias"):
        parameters += width
    return _Attention(parameters, 2 * kv_heads * head, kv_heads, 4 * heads * head)


def _latent_attention(name: str, config: Mapping[str, Any], width: int) -> _Attention:
    """Heads whose keys and values are computed from one compressed vector."""
    heads = _count(name, config, "num_attention_heads")
    latent = _count(name, config, "kv_lora_rank")
    rotary = _count(name, config, "qk_rope_head_dim")
    other = _count(name, config, "qk_nope_head_dim")
    value = _count(name, config, "v_head_dim")
    query = heads * (other + rotary)
    if config.get("q_lora_rank"):
        compressed = _count(name, config, "q_lora_rank")
        queries = compressed * (width + 1 + query)  # a norm between the two matrices
    else:
        queries = width * query
    keys_and_values = width * (latent + rotary) + latent * (1 + heads * (other + value))
    parameters = queries + keys_and_values + heads * value * width
    return _Attention(parameters, latent + rotary, 1, 2 * heads * (2 * latent + rotary))


def _feed_forward(name: str, config: Mapping[str, Any], layers: int, width: int) -> _FeedForward:
    """Dense networks, experts, or dense networks in the first layers and experts in the others;
    every token reads shared experts."""
    keys = ("num_local_experts", "num_experts", "n_routed_experts")
    num_experts = next((int(config[key]) for key in keys if config.get(key)), 1)
    num_dense = layers if num_experts == 1 else config.get("first_k_dense_replace") or 0
    sparse = max(0, layers - num_dense)
    shared = 0
    if sparse < layers:
        inner = _count(name, config, "intermediate_size")
        shared += _GATED * width * inner * (layers - sparse)
    if not sparse:
        return _FeedForward(shared)
    inner = config.get("moe_intermediate_size") or _count(name, config, "intermediate_size")
    expert = _GATED * width * inner * sparse
    shared += expert * (config.get("n_shared_experts") or 0)
    if config.get("shared_expert_intermediate_size"):  # Qwen's, with a gate for each
        one = _count(name, config, "shared_expert_intermediate_size")
        shared += (_GATED * width * one + width) * sparse
    shared += width * num_experts * sparse  # the router
    return _FeedForward(shared, expert, num_experts, _count(name, config, "num_experts_per_tok"))


def _count(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameterError(
            f"model {name!r}: its config.json has {key}={value!r}, and a decoder needs a number "
            f"there; pass the number of parameters instead, such as 7B"
        )
    return value
