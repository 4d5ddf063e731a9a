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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.errors import InvalidParameterError, ModelLoadError, UnsupportedModelError
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


def read_block_head(folder: str | Path) -> BlockNetwork:
    """Reads a block head in float32.

    Raises:
        ModelLoadError: files that are missing, damaged, or do not fit each other.
        UnsupportedModelError: a variant that is not supported; the message names it.
        VocabularyMismatchError: tables of a reduced vocabulary that contradict each other.
    """
    folder = Path(folder)
    raw = read_config(folder)
    try:
        config, num_draft_tokens = _parse(raw)
    except KeyError as error:
        raise ModelLoadError(f"{folder}: its config has no {error.args[0]!r}") from None
    except InvalidParameterError as error:
        raise ModelLoadError(f"{folder}: {error}") from None
    tensors = read_tensors(folder)
    vocabulary = None
    if num_draft_tokens != config.num_tokens:
        vocabulary = _vocabulary(tensors, config.num_tokens, num_draft_tokens, folder)
    network = BlockNetwork(config, vocabulary).eval()
    skipped = [*_OF_THE_TARGET, "t2d", "d2t"]
    if vocabulary is None:
        skipped.append("lm_head.weight")
    fill(network, tensors, folder, skipped)
    return network


def write_block_head(
    network: BlockNetwork, folder: str | Path, target: str, architectures: list[str]
) -> None:
    """Writes a head as ``speculators`` does.

    Args:
        network: the head.
        folder: made if it does not exist.
        target: name or folder of the target, which vLLM loads it by.
        architectures: of the target's config.
    """
    tensors = {name: parameter.data for name, parameter in network.named_parameters()}
    vocabulary = network.vocabulary
    if vocabulary is not None:
        tensors |= {"t2d": vocabulary.t2d, "d2t": vocabulary.d2t}
    write_head(Path(folder), _speculators_config(network, target, architectures), tensors)


def _parse(raw: Mapping[str, Any]) -> tuple[BlockConfig, int]:
    """The config and the size of the draft vocabulary."""
    if "speculators_model_type" not in raw:
        return _parse_native(raw)
    layers = raw["transformer_layer_config"]
    is_dspark = raw["speculators_model_type"] == "dspark"
    settings = _dspark_settings(raw) if is_dspark else {}
    config = BlockConfig.build(
        layers,
        block_size=raw.get("block_size", 8),
        mask_token_id=_mask(raw),
        target_layers=tuple(raw["aux_hidden_state_layer_ids"] or ()),
        target_hidden_size=raw.get("target_hidden_size"),
        sample_from_anchor=raw.get("sample_from_anchor", is_dspark),
        **settings,
    )
    return config, raw.get("draft_vocab_size") or config.num_tokens


def _parse_native(raw: Mapping[str, Any]) -> tuple[BlockConfig, int]:
    fields = {**raw, **raw.get("dflash_config", {})}
    names = raw.get("architectures") or ()
    is_dspark = fields.get("projector_type") == "dspark" or any("DSpark" in n for n in names)
    projector = fields.get("projector_type", "dflash")
    if projector not in ("dflash", "dspark"):
        raise UnsupportedModelError(
            f"a block head with projector_type={projector!r}: only dflash and dspark are supported"
        )
    config = BlockConfig.build(
        {key: value for key, value in raw.items() if key not in ("architectures", "auto_map")},
        block_size=fields["block_size"],
        mask_token_id=_mask(fields),
        target_layers=tuple(layer + 1 for layer in fields["target_layer_ids"]),
        sample_from_anchor=is_dspark,
        **(_dspark_settings(fields) if is_dspark else {}),
    )
    return config, fields.get("draft_vocab_size") or config.num_tokens


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


def _vocabulary(
    tensors: Mapping[str, Tensor], num_tokens: int, num_draft_tokens: int, folder: Path
) -> DraftVocabulary:
    for name, size in (("t2d", num_tokens), ("d2t", num_draft_tokens)):
        found = "none" if name not in tensors else str(tuple(tensors[name].shape))
        if found != str((size,)):
            raise ModelLoadError(
                f"{folder}: a draft vocabulary of {num_draft_tokens} of {num_tokens} tokens needs a "
                f"table {name!r} of shape ({size},), and the files have {found}"
            )
    return DraftVocabulary(tensors["t2d"], tensors["d2t"])


def _speculators_config(
    network: BlockNetwork, target: str, architectures: list[str]
) -> dict[str, Any]:
    config = network.config
    kind = config.kind
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
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.num_tokens,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": False,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
    }
    if network.vocabulary is not None:
        written["draft_vocab_size"] = network.vocabulary.num_tokens
    if kind == "dspark":
        written |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    return written
