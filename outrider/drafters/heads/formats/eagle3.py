"""EAGLE-3 and P-EAGLE checkpoints: loads published layouts, saves in the ``speculators`` format.

    speculators           "speculators_model_type": "eagle3" or "peagle", the layer under
                          "transformer_layer_config"; tensors layers.0.*
    EAGLE, SpecForge      "architectures": ["LlamaForCausalLMEagle3"], the layer's fields at the top
                          level beside "draft_vocab_size"; tensors midlayer.*

The first is what vLLM reads; the names of its tensors are those of :class:`Eagle3Network`. Its
layer ids i mean ``hidden_states[i]`` of ``transformers``, as here. The tables ``d2t`` and ``t2d``
are there only if the draft vocabulary is smaller than the target's.

The second layout says nothing about the layers that the head reads unless it has
``eagle_config.eagle_aux_hidden_state_layer_ids``; the authors' own choice depends on the target's
number of layers, which is then taken from the target.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.core.errors import ModelLoadError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.eagle3_network import (
    NO_TOKENS,
    Eagle3Config,
    Eagle3Network,
    default_layers,
    layer_config,
)
from outrider.drafters.heads.formats.folder import (
    read_config,
    read_tensors,
    require,
    write_folder,
)
from outrider.drafters.heads.peagle import PEagleHead
from outrider.runtime import HFModel

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle")
"""Names of the second layout's architecture; the last one only with a draft vocabulary."""
SPECULATORS_VERSION = "0.9.0"
"""The version of the format that is written."""
_ARCHITECTURE = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}
_TABLES = ("d2t", "t2d")
_NORMS = {f"aux_norm_{name}": f"fc_norm.{j}" for j, name in enumerate(("low", "mid", "high"))}
_UNUSED = ("rotary_emb", "verifier_lm_head", "verifier_norm")


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of an EAGLE-3 head."""
    if "speculators_model_type" in config:
        return bool(config["speculators_model_type"] == "eagle3")
    named = any(name in ARCHITECTURES for name in config.get("architectures") or ())
    return named and config.get("draft_vocab_size") is not None


def is_peagle(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a P-EAGLE head."""
    return bool(config.get("speculators_model_type") == "peagle")


def load_eagle3(folder: str | Path, target: HFModel) -> Eagle3Head:
    """The head in a folder.

    Args:
        folder: with ``config.json`` and weights.
        target: the target, for what the layout leaves to it.

    Raises:
        ModelLoadError: files that are missing or do not fit each other.
    """
    name = f"head {folder}"
    values = read_config(folder)
    if values is None:
        raise ModelLoadError(f"{name}: there is no config.json")
    tensors = _renamed(read_tensors(folder))
    read = _speculators_config if "speculators_model_type" in values else _flat_config
    config = read(values, target, name)
    tables = [tensors.pop(table, None) for table in _TABLES]
    embedding = tensors.pop("embed_tokens.weight", None)
    if "lm_head.weight" not in tensors:
        raise ModelLoadError(f"{name} has no tensor lm_head.weight: the folder is incomplete")
    size, V = len(tensors["lm_head.weight"]), config.layer.vocab_size
    if size != config.draft_vocab_size:
        raise ModelLoadError(
            f"{name}: config.json says draft_vocab_size {config.draft_vocab_size}, and lm_head has "
            f"{size} rows: the files belong to different heads"
        )
    if size == V and tables[0] is not None and not bool(tables[0].any()):
        tables = [None, None]  # the identity, which some checkpoints spell out
    vocabulary = DraftVocabulary.from_tables(tables[0], tables[1], size, V, name)
    network = Eagle3Network(config)
    _fill(network, tensors, name)
    own = None if embedding is None else nn.Embedding.from_pretrained(embedding)
    kind = Eagle3Head if config.mask_token_id is None else PEagleHead
    return kind(network, vocabulary, name, own)


def save_eagle3(head: Eagle3Head, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a head in the ``speculators`` format. Embeddings are written only if the head has its
    own.

    Args:
        head: the head.
        folder: made if it does not exist.
        dtype: of the weights.
    """
    tensors = {name: weight.to(dtype) for name, weight in head.network.state_dict().items()}
    if head.embedding is not None:
        tensors["embed_tokens.weight"] = head.embedding.weight.to(dtype)
    if not head.vocabulary.is_full:
        tensors["d2t"], tensors["t2d"] = head.vocabulary.d2t_D, head.vocabulary.t2d_V
    write_folder(folder, _as_speculators(head.config, dtype), tensors)


def _as_speculators(config: Eagle3Config, dtype: torch.dtype) -> dict[str, object]:
    """The fields of a ``speculators`` configuration, those that vLLM requires among them."""
    layer = config.layer.to_dict()
    hidden = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"}
    layer = {k: v for k, v in layer.items() if k not in hidden and v is not None}
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    written = {
        "speculators_model_type": config.kind,
        "speculators_version": SPECULATORS_VERSION,
        "architectures": [_ARCHITECTURE[config.kind]],
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(config.target_layers),
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": config.target_name,
                "architectures": list(config.target_architectures),
            },
        },
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return written if config.mask_token_id is None else written | _of_peagle(config)


def _of_peagle(config: Eagle3Config) -> dict[str, object]:
    """What a P-EAGLE head has beside the fields of an EAGLE-3 head, or otherwise."""
    return {"mask_token_id": config.mask_token_id, "embed_requires_grad": True}


def _speculators_config(values: Mapping[str, Any], target: HFModel, name: str) -> Eagle3Config:
    layer = layer_config(require(values, "transformer_layer_config", name))
    about = values.get("speculators_config") or {}
    methods = about.get("proposal_methods") or [{}]
    verifier = about.get("verifier") or {}
    layers = values.get("eagle_aux_hidden_state_layer_ids")
    return Eagle3Config(
        layer,
        require(values, "draft_vocab_size", name),
        tuple(layers) if layers else default_layers(target.num_layers),
        values.get("target_hidden_size") or layer.hidden_size,
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        target_name=verifier.get("name_or_path"),
        num_speculative_tokens=methods[0].get("speculative_tokens") or 5,
        target_architectures=tuple(verifier.get("architectures") or ()),
        mask_token_id=require(values, "mask_token_id", name) if is_peagle(values) else None,
    )


def _flat_config(values: Mapping[str, Any], target: HFModel, name: str) -> Eagle3Config:
    own = values.get("eagle_config") or {}
    layers = own.get("eagle_aux_hidden_state_layer_ids")
    size = require(values, "draft_vocab_size", name)
    fields = {key: value for key, value in values.items() if key != "model_type"}
    layer = LlamaConfig(**{**NO_TOKENS, **fields})
    layer.num_hidden_layers = 1  # in this layout the number may be the target's
    return Eagle3Config(
        layer,
        size,
        tuple(layers) if layers else default_layers(target.num_layers),
        values.get("target_hidden_size") or layer.hidden_size,
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(values.get("norm_before_fc", False)),
        fc_norm=bool(values.get("fc_norm", False)),
    )


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of :class:`Eagle3Network`."""
    named = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        name = name.replace("midlayer.", "layers.0.")
        for alias, standard in _NORMS.items():
            name = name.replace(alias, standard)
        if not name.startswith(_UNUSED):
            named[name] = tensor
    return named


def _fill(network: Eagle3Network, tensors: dict[str, Tensor], name: str) -> None:
    """Copies tensors into a network.

    Raises:
        ModelLoadError: tensors that are missing, unknown or of another shape.
    """
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    found = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for problem, keys in (
        ("has no tensor", sorted(wanted.keys() - found.keys())),
        ("has a tensor that no EAGLE-3 head has:", sorted(found.keys() - wanted.keys())),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelLoadError(f"{name} {problem} {keys[0]}{more}; the folder is incomplete")
    for key, shape in wanted.items():
        if found[key] != shape:
            raise ModelLoadError(
                f"{name}: tensor {key} has shape {found[key]}, and config.json says {shape}: the "
                f"files belong to different heads, or the head was trained for another target"
            )
    dtype = tensors["fc.weight"].dtype
    network.to(dtype)
    network.load_state_dict(tensors)
