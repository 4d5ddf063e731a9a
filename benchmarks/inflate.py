"""Inflates a trained model to the cost of a larger one: the same function, more parameters.

The speed of a model depends on its size, its acceptance on what it has learned. Inflation widens
and deepens a small trained model of the Llama architecture with parameters that contribute nothing,
so that measurements of speed have real outputs and real acceptance at the cost of a model of any
size. State this beside every result.

    python -m benchmarks.inflate --model runs/smollm2/model --out runs/smollm2/inflated

writes the folder of a model of the Llama architecture as one of about a billion parameters.

    hidden width d → D     new channels of the residual stream are zero, because the rows of the
                           embedding and of all output projections that write to them are zero
    RMSNorm                x / √(Σx²/d + ε) = √(d/D) x / √(Σx²/D + ε d/D), so weights are scaled by
                           √(d/D) and ε becomes ε d/D
    heads, MLP width       new ones are computed, but their columns of the output projection are
                           zero
    new layers             both output projections are zero

All other new parameters are random, because zeros might be computed faster. The head size and the
number of query heads per key-value head do not change. In bfloat16 the norm weights are rounded
once more, unless D is d times a power of four.
"""

import argparse
import copy
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from outrider.core.errors import InvalidParameterError, UnsupportedModelError

_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """The size to inflate a model to.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_key_value_heads: key-value heads; the number of query heads follows from it.
        intermediate_size: width of the MLP.
    """

    hidden_size: int
    num_layers: int
    num_key_value_heads: int
    intermediate_size: int


def inflate(module: Any, shape: Shape, seed: int = 0) -> Any:
    """A new model with the same logits, up to a relative error of 1e-5 in float32.

    Args:
        module: a ``transformers`` model of the Llama architecture; not changed.
        shape: the new size; nothing may be smaller than in the model.
        seed: seed of the new random parameters.

    Raises:
        UnsupportedModelError: the model has another architecture.
        InvalidParameterError: a size is smaller than the model's own.
    """
    config = module.config
    if type(module).__name__ != "LlamaForCausalLM":
        raise UnsupportedModelError(
            f"{type(module).__name__} cannot be inflated: only LlamaForCausalLM can"
        )
    group = config.num_attention_heads // config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    larger = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
    }
    for name, value in larger.items():
        if value < getattr(config, name):
            raise InvalidParameterError(
                f"{name}={value}: the model has {getattr(config, name)}; inflation only adds"
            )
    wide = copy.deepcopy(config)
    wide.update(larger | {"num_attention_heads": group * shape.num_key_value_heads})
    ratio = config.hidden_size / shape.hidden_size
    wide.update({"head_dim": head_dim, "rms_norm_eps": config.rms_norm_eps * ratio})
    new = _empty(type(module), wide, module.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.normal_(std=_STD, generator=generator)
        _fill(module, new, ratio**0.5)
    return new.to(module.device).eval()


def _empty(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model with arbitrary parameters, created in this precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def _fill(old: Any, new: Any, scale: float) -> None:
    """Copies the old model's parameters into the leading entries of the new ones."""
    new.model.embed_tokens.weight.zero_()
    _copy(old.model.embed_tokens.weight, new.model.embed_tokens.weight)
    if not old.config.tie_word_embeddings:
        _copy(old.lm_head.weight, new.lm_head.weight)
    _norm(old.model.norm, new.model.norm, scale)
    for i, layer in enumerate(new.model.layers):
        outputs = (layer.self_attn.o_proj, layer.mlp.down_proj)
        for projection in outputs:
            projection.weight.zero_()
            if projection.bias is not None:
                projection.bias.zero_()
        if i >= len(old.model.layers):
            continue
        mine = old.model.layers[i]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _norm(getattr(mine, norm), getattr(layer, norm), scale)
        for part, names in (
            ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ):
            for name in names:
                _linear(getattr(getattr(mine, part), name), getattr(getattr(layer, part), name))


def _linear(old: nn.Linear, new: nn.Linear) -> None:
    _copy(old.weight, new.weight)
    if old.bias is not None:
        _copy(old.bias, new.bias)


def _norm(old: Any, new: Any, scale: float) -> None:
    new.weight.fill_(1.0)
    new.weight[: old.weight.shape[0]] = old.weight * scale


def _copy(old: Tensor, new: Tensor) -> None:
    new[tuple(slice(0, size) for size in old.shape)] = old


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes an inflated model beside the files of its tokenizer."""
    parser = argparse.ArgumentParser(description="Inflate a model to the cost of a larger one.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the inflated one")
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--key-value-heads", type=int, default=8)
    parser.add_argument("--intermediate-size", type=int, default=4096)
    given = parser.parse_args(arguments)
    shape = Shape(given.hidden_size, given.layers, given.key_value_heads, given.intermediate_size)
    wide = inflate(AutoModelForCausalLM.from_pretrained(given.model), shape)
    wide.save_pretrained(given.out)
    for file in given.model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != "config.json":
            shutil.copy(file, given.out / file.name)
    count = sum(parameter.numel() for parameter in wide.parameters())
    print(f"{given.out}: {count / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
