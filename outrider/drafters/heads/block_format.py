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

from transformers import Qwen3Config

from outrider.core.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.weights import fill, read_config, read_tensors, write_head

SPECULATORS_VERSION = "0.9.0"
"""The release of ``speculators`` whose format is written."""

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
_OF_THE_TARGET = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def is_block_head(config: Mapping[str, Any]) -> bool:
    """Whether a folder's config is that of a block head."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] in _ARCHITECTURES
    named = any("DFlash" in name or "DSpark" in name for name in config.get("architectures") or ())
    return named or "dflash_config" in config


def read_block_head(folder: str | Path) -> BlockHead:
    """Reads a block head in float32.

    Raises:
        ModelLoadError: files that are missing, damaged, or do not fit each other.
        UnsupportedModelError: a variant that is not supported; the message names it.
    """
    folder = Path(folder)
    raw = read_config(folder)
    try:
        config = _parse(raw)
    except KeyError as error:
        raise ModelLoadError(f"{folder}: its config has no {error.args[0]!r}") from None
    except InvalidParameterError as error:
        raise ModelLoadError(f"{folder}: {error}") from None
    tensors = read_tensors(folder)
    size, num_tokens = config.draft_vocab_size, config.num_tokens
    tables = tensors.get("d2t"), tensors.get("t2d")
    if not config.has_own_output:
        tables = None, None
    vocabulary = DraftVocabulary.from_tables(*tables, size, num_tokens, str(folder))
    skipped = {*_OF_THE_TARGET, "t2d", "d2t"}
    if not config.has_own_output:
        skipped.add("lm_head.weight")
    network = BlockNetwork(config).eval()
    fill(network, tensors, folder, skipped)
    return BlockHead(network, vocabulary, str(folder))


def write_block_head(
    head: BlockHead, folder: str | Path, target: str | None, architectures: Sequence[str]
) -> None:
    """Writes a head as ``speculators`` does.

    Args:
        head: the head.
        folder: made if it does not exist.
        target: name or folder of the target, which vLLM loads it by.
        architectures: of the target's config.
    """
    tensors = {name: parameter.data for name, parameter in head.network.named_parameters()}
    if head.network.config.has_own_output:
        tensors |= {"t2d": head.vocabulary.t2d_V, "d2t": head.vocabulary.d2t_D}
    write_head(Path(folder), _speculators_config(head.network, target, architectures), tensors)


def _parse(raw: Mapping[str, Any]) -> BlockConfig:
    if "speculators_model_type" not in raw:
        return _parse_native(raw)
    layers = Qwen3Config(**raw["transformer_layer_config"])
    is_dspark = raw["speculators_model_type"] == "dspark"
    return BlockConfig(
        layers,
        block_size=raw.get("block_size", 8),
        mask_token_id=_mask(raw),
        target_layers=tuple(raw["aux_hidden_state_layer_ids"] or ()),
        draft_vocab_size=raw.get("draft_vocab_size") or layers.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or layers.hidden_size,
        sample_from_anchor=raw.get("sample_from_anchor", is_dspark),
        **(_dspark_settings(raw) if is_dspark else {}),
    )


def _parse_native(raw: Mapping[str, Any]) -> BlockConfig:
    fields = {**raw, **raw.get("dflash_config", {})}
    named_dspark = any("DSpark" in name for name in raw.get("architectures") or ())
    projector = fields.get("projector_type") or ("dspark" if named_dspark else "dflash")
    if projector not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"a block head with projector_type={projector!r}: only dflash and dspark are supported"
        )
    is_dspark = projector == "dspark"
    layers = Qwen3Config(
        **{key: value for key, value in raw.items() if key not in ("architectures", "auto_map")}
    )
    return BlockConfig(
        layers,
        block_size=fields["block_size"],
        mask_token_id=_mask(fields),
        target_layers=tuple(layer + 1 for layer in fields["target_layer_ids"]),
        draft_vocab_size=fields.get("draft_vocab_size") or layers.vocab_size,
        target_hidden_size=fields.get("target_hidden_size") or layers.hidden_size,
        sample_from_anchor=is_dspark,
        **(_dspark_settings(fields) if is_dspark else {}),
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


def _mask(fields: Mapping[str, Any]) -> int:
    if fields.get("mask_token_id") is None:
        raise KeyError("mask_token_id")
    return int(fields["mask_token_id"])


def _speculators_config(
    network: BlockNetwork, target: str | None, architectures: Sequence[str]
) -> dict[str, Any]:
    config = network.config
    kind, own_width = config.kind, config.target_hidden_size == config.layers.hidden_size
    layers = config.layers.to_diff_dict() | {"layer_types": list(config.layers.layer_types)}
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
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
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
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
    }
    if kind == "dspark":
        written |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    return written
