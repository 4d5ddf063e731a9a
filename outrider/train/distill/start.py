"""What a draft starts from: an existing model, some of the target's layers, or random weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from outrider.core.errors import InvalidParameterError, UnsupportedModelError
from outrider.runtime import HFModel, load_model
from outrider.runtime.hf.hidden_states import decoder_layers
from outrider.train.distill.shape import Shape
from outrider.train.models import Architecture, build_llama


def copy_embeddings(target: Any, draft: Any) -> bool:
    """Start the draft from the target's embeddings (and so its tied head) and final norm.

    Mutates `draft`.  Returns False, changing nothing, when the hidden sizes differ.
    """
    if target.config.hidden_size != draft.config.hidden_size:
        return False
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight)
    return True


def reduce_embeddings(target: Any, draft: Any) -> bool:
    """Start a draft that is narrower than the target from the target's embeddings E, reduced.

    The draft's table is E V, where the columns of V are the r eigenvectors of EᵀE with the largest
    eigenvalues, and r is the draft's width. Of all tables of rank r, E V Vᵀ is the closest to E
    (Eckart and Young, 1936), so tokens that the target takes for alike begin alike in the draft.
    The final norm's weight makes the logits of a random state begin with a variance of about 1.

    Mutates `draft`.  Returns False, changing nothing, when the draft is not narrower.
    """
    width = draft.config.hidden_size
    if width >= target.config.hidden_size:
        return False
    with torch.no_grad():
        table_VH = target.model.embed_tokens.weight.double()
        _, directions_HH = torch.linalg.eigh(table_VH.T @ table_VH)  # ascending
        reduced_VR = table_VH @ directions_HH[:, -width:]
        draft.model.embed_tokens.weight.copy_(reduced_VR)
        draft.model.norm.weight.fill_(float(reduced_VR.norm(dim=1).pow(2).mean().rsqrt()))
    return True


def from_folder(folder: str | Path) -> HFModel:
    """An existing model, in float32, with its tokenizer.

    Raises:
        ModelLoadError: no such folder or id, or files that are no decoder.
    """
    return load_model(folder, dtype=torch.float32, device="cpu", role="draft")


def from_layers(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A model of the target's own family with some of its layers, and everything else of it.

    Args:
        target: any decoder that keeps its layers in a list; not changed.
        layers: which, ascending, from 0.

    Raises:
        InvalidParameterError: a layer that the target does not have, or twice.
        UnsupportedModelError: a model whose layers cannot be taken apart.
    """
    name = type(target).__name__
    text = target.config.get_text_config()
    num_layers: int = text.num_hidden_layers
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not 0 <= layers[0] <= layers[-1] < num_layers
    ):
        raise InvalidParameterError(
            f"layers {', '.join(map(str, layers)) or 'none'} of the target: must ascend, each from "
            f"0 to {num_layers - 1}"
        )
    if text is not target.config:
        raise UnsupportedModelError(
            f"the target ({name}) has a model of other inputs beside its decoder; start from a "
            "model or from scratch"
        )
    path = _path_of(target, decoder_layers(target, num_layers, "the target"))
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    for key, value in vars(target.config).items():  # such as layer_types
        if isinstance(value, list | tuple) and len(value) == num_layers and "layer" in key:
            setattr(config, key, type(value)(value[layer] for layer in layers))
    draft = type(target)(config).float().eval()
    weights = target.state_dict()
    renamed = {
        key: weights[_in_target(key, path, layers)]
        for key in draft.state_dict()
        if _in_target(key, path, layers) in weights
    }
    missing = sorted(set(draft.state_dict()) - set(renamed))
    if missing:
        raise UnsupportedModelError(
            f"the target ({name}) has no tensor for {missing[0]} of a model with fewer layers; "
            "start from a model or from scratch"
        )
    try:
        draft.load_state_dict(renamed)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UnsupportedModelError(
            f"the layers of the target ({name}) do not fit a model with fewer of them ({reason}); "
            "start from a model or from scratch"
        ) from error
    return _with_ends_of(target, draft)


def evenly_spaced(num: int, num_layers: int) -> tuple[int, ...]:
    """So many of a target's layers, the first and the last among them."""
    if not 1 <= num <= num_layers:
        raise InvalidParameterError(
            f"{num} layers of the target: it has {num_layers}, so from 1 to {num_layers}"
        )
    if num == 1:
        return (0,)
    return tuple(round(index * (num_layers - 1) / (num - 1)) for index in range(num))


def from_scratch(target: PreTrainedModel, shape: Shape, seed: int) -> PreTrainedModel:
    """A Llama with random weights and the target's vocabulary.

    Where target and draft are Llamas of the same width, the draft starts from the target's
    embeddings and final norm; where the draft is narrower, from the embeddings, reduced.
    """
    text = target.config.get_text_config()
    architecture = Architecture(
        vocab_size=text.vocab_size,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
    )
    draft = build_llama(architecture, seed).eval()
    inner = getattr(target, "model", None)
    if hasattr(inner, "embed_tokens") and hasattr(inner, "norm"):
        copy_embeddings(target, draft) or reduce_embeddings(target, draft)
    return _with_ends_of(target, draft)


def _with_ends_of(target: PreTrainedModel, draft: PreTrainedModel) -> PreTrainedModel:
    """Gives the draft the target's special tokens."""
    ends: Any = target.generation_config
    ids = {
        name: getattr(ends, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    draft.generation_config = GenerationConfig(**ids)
    for name, value in ids.items():
        setattr(draft.config, name, value)
    return draft


def _path_of(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """The name of the list that holds a model's layers."""
    return next(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and list(module) == list(layers)
    )


def _in_target(key: str, path: str, layers: Sequence[int]) -> str:
    """The target's name of one of the draft's tensors."""
    prefix = f"{path}."
    if not key.startswith(prefix):
        return key
    number, _, rest = key.removeprefix(prefix).partition(".")
    return f"{prefix}{layers[int(number)]}.{rest}"
