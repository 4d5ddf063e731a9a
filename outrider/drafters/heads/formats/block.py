"""Files of block heads: the ``speculators`` formats dflash and dspark, and the authors' own.

    speculators   ``speculators_model_type``, ``transformer_layer_config``;
                  ``aux_hidden_state_layer_ids`` number layers as ``hidden_states`` of transformers
    native        a flat Qwen3 config with ``block_size`` and, in ``dflash_config`` or beside it,
                  ``mask_token_id`` and ``target_layer_ids``, which count layers from 0 and mean
                  their outputs: layer id i is ``hidden_states[i + 1]``

Heads are saved as ``speculators`` writes them, which vLLM serves. ``sample_from_anchor`` is always
written: readers disagree on what its absence means for dspark.

The target's embeddings and output head are not part of a head; copies of them in a file are
skipped. A head with a reduced vocabulary has an output head of its own, ``d2t`` and ``t2d``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from outrider.core.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.formats.fill import fill
from outrider.drafters.heads.formats.folder import (
    read_config,
    read_tensors,
    require,
    write_folder,
)
from outrider.runtime import HFModel

SPECULATORS_VERSION = "0.9.0"
"""The release of ``speculators`` whose format is written."""

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
_OF_THE_TARGET = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a DFlash head."""
    return _kind(config) == "dflash"


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a DSpark head."""
    return _kind(config) == "dspark"


def load_block(folder: str | Path, target: HFModel | None = None) -> BlockHead:
    """The head in a folder, in float32.

    Args:
        folder: with ``config.json`` and weights.
        target: not needed: the files say all about it.

    Raises:
        ModelLoadError: files that are missing or do not fit each other.
        UnsupportedModelError: a variant that is not supported; names it.
    """
    name = f"head {folder}"
    raw = read_config(folder)
    if raw is None:
        raise ModelLoadError(f"{name}: there is no config.json")
    try:
        config = _parse(raw, name)
    except InvalidParameterError as error:
        raise ModelLoadError(f"{name}: {error}") from None
    tensors = read_tensors(folder)
    tables = [tensors.pop(table, None) for table in ("d2t", "t2d")]
    skipped: tuple[str, ...] = _OF_THE_TARGET
    if not config.has_own_output:
        tables, skipped = [None, None], (*skipped, "lm_head.weight")
    vocabulary = DraftVocabulary.from_tables(
        tables[0], tables[1], config.draft_vocab_size, config.num_tokens, name
    )
    network = BlockNetwork(config).eval()
    fill(network, tensors, name, skipped)
    return BlockHead(network, vocabulary, name)


def save_block(
    head: BlockHead,
    folder: str | Path,
    target_name: str | None = None,
    architectures: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a head in the ``speculators`` format.

    Args:
        head: the head.
        folder: made if it does not exist.
        target_name: folder or hub id of the target, which vLLM loads it by.
        architectures: of the target's config.
        dtype: of the weights.
    """
    tensors = {name: weight.to(dtype) for name, weight in head.network.named_parameters()}
    if head.config.has_own_output:
        tensors["d2t"], tensors["t2d"] = head.vocabulary.d2t_D, head.vocabulary.t2d_V
    config = _as_speculators(head.config, target_name, architectures, dtype)
    write_folder(Path(folder), config, tensors)


def _kind(config: Mapping[str, Any]) -> str | None:
    """``dflash``, ``dspark`` or None for any other config."""
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return kind if kind in _ARCHITECTURES else None
    names = config.get("architectures") or ()
    projector = config.get("dflash_config", {}).get("projector_type")
    if projector == "dspark" or any("DSpark" in name for name in names):
        return "dspark"
    return "dflash" if "dflash_config" in config or any("DFlash" in n for n in names) else None


def _parse(raw: Mapping[str, Any], name: str) -> BlockConfig:
    if "speculators_model_type" not in raw:
        return _parse_native(raw, name)
    layers = Qwen3Config(**require(raw, "transformer_layer_config", name))
    return BlockConfig(
        layers,
        block_size=raw.get("block_size", 8),
        mask_token_id=require(raw, "mask_token_id", name),
        target_layers=tuple(require(raw, "aux_hidden_state_layer_ids", name)),
        draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or layers.hidden_size,
        sample_from_anchor=raw.get("sample_from_anchor", is_dspark(raw)),
        **(_dspark_settings(raw) if is_dspark(raw) else {}),
    )


def _parse_native(raw: Mapping[str, Any], name: str) -> BlockConfig:
    fields = {**raw, **raw.get("dflash_config", {})}
    projector = fields.get("projector_type", "dflash")
    if projector not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name} has projector_type {projector!r}: only dflash and dspark are supported"
        )
    layers = Qwen3Config(**{key: value for key, value in raw.items() if key != "architectures"})
    return BlockConfig(
        layers,
        block_size=require(fields, "block_size", name),
        mask_token_id=require(fields, "mask_token_id", name),
        target_layers=tuple(layer + 1 for layer in require(fields, "target_layer_ids", name)),
        draft_vocab_size=fields.get("draft_vocab_size") or layers.vocab_size,
        target_hidden_size=fields.get("target_hidden_size") or layers.hidden_size,
        sample_from_anchor=is_dspark(raw),
        **(_dspark_settings(fields) if is_dspark(raw) else {}),
    )


def _dspark_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    kind = fields.get("markov_head_type", "vanilla")
    rank = fields.get("markov_rank", 256)
    if rank and kind != "vanilla":
        raise UnsupportedModelError(
            f"a dspark head with markov_head_type={kind!r}: only 'vanilla' is supported"
        )
    return {
        "markov_rank": rank,
        "has_confidence": fields.get("enable_confidence_head", True),
        "confidence_reads_markov": bool(rank) and fields.get("confidence_head_with_markov", True),
    }


def _as_speculators(
    config: BlockConfig, target_name: str | None, architectures: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of a ``speculators`` configuration, those that vLLM requires among them."""
    kind, own_width = config.kind, config.target_hidden_size == config.layers.hidden_size
    layers = config.layers.to_diff_dict() | {"layer_types": list(config.layers.layer_types or ())}
    written: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_slots,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(architectures)},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "target_hidden_size": None if own_width else config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if kind == "dspark":
        written |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    return written
