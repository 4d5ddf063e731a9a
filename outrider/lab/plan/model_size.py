"""The numbers of a model that determine its cost: weights, operations, KV cache.

A model is named by its parameters (``70B``), or read from its ``config.json``. Of a model that is
only a number, layers and widths are those of the nearest of the Llama 3 and SmolLM2 models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        kv_width: of the keys, and of the values, of a layer.
        kv_heads: key-value heads; with more GPUs than that, heads are stored more than once.
        expert: parameters of one expert in all layers; 0 for a dense model.
        num_experts, per_token: experts per layer, and those that a token is routed to.
        weight_bytes: bytes per parameter.
        kv_bytes: bytes per number in the KV cache.
    """

    name: str
    shared: float
    layers: int
    width: int
    kv_width: int
    kv_heads: int
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
        """Operations of a pass: two per weight and token, and four per hidden unit, layer, token
        and attended position."""
        active = self.shared + self.expert * self.per_token
        return tokens * (2 * active + 4 * self.layers * self.width * context)

    def cache_bytes(self, tokens: float, degree: int = 1) -> float:
        """Bytes of the KV cache of this many tokens on one of ``degree`` GPUs."""
        share = 1 / min(degree, self.kv_heads)  # a key-value head is never divided
        return 2 * self.layers * self.kv_width * self.kv_bytes * tokens * share


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
        kv_width,
        kv_heads,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
    )


def _of_config(
    name: str, config: Mapping[str, Any], weight_bytes: float, kv_bytes: float
) -> ModelSize:
    """Counts the weights of a Llama-like decoder: attention, gated feed-forward networks or
    experts, two norms per layer, embeddings."""
    layers = _count(name, config, "num_hidden_layers")
    width = _count(name, config, "hidden_size")
    heads = _count(name, config, "num_attention_heads")
    vocabulary = _count(name, config, "vocab_size")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    tables = 1 if config.get("tie_word_embeddings") else 2
    attention = 2 * width * head * (heads + kv_heads)
    shared = layers * (attention + 2 * width) + width + tables * vocabulary * width
    experts = next(
        (
            int(config[key])
            for key in ("num_local_experts", "num_experts", "n_routed_experts")
            if config.get(key)
        ),
        1,
    )
    if experts > 1:
        inner = config.get("moe_intermediate_size") or _count(name, config, "intermediate_size")
        expert, per_token = (
            _GATED * width * inner * layers,
            _count(name, config, "num_experts_per_tok"),
        )
        shared += layers * width * experts  # the router
    else:
        shared += _GATED * width * _count(name, config, "intermediate_size") * layers
        expert, per_token = 0, 1
    return ModelSize(
        name,
        shared,
        layers,
        width,
        kv_heads * head,
        kv_heads,
        expert,
        experts,
        per_token,
        weight_bytes,
        kv_bytes,
    )


def _count(name: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParameterError(
            f"model {name!r}: its config.json has {key}={value!r}, and a decoder needs a number "
            f"there; pass the number of parameters instead, such as 7B"
        )
    return value
