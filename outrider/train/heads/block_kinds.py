"""The block heads that can be trained: DFlash and DSpark, with their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_network import default_layers
from outrider.drafters.heads.formats.block import load_block
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatches
from outrider.train.heads.block import BlockTraining
from outrider.train.heads.block_loss import BlockLoss
from outrider.train.heads.initial import (
    copy_final_norm,
    layer_shape,
    rarest_token,
    read_last_layer,
)
from outrider.train.heads.kind import Ground, HeadKind
from outrider.train.heads.layers import Layers
from outrider.train.heads.states import States
from outrider.train.heads.teacher import Teacher

AUTO = Layers()


def _layers(target: HFModel, values: Mapping[str, Any]) -> tuple[int, ...]:
    if values["start"]:
        return load_block(values["start"]).target_layers
    chosen: Layers = values["layers"]
    return chosen.of(target, default_layers(target.num_layers))


def _dflash(
    ground: Ground,
    *,
    block_size: int = 7,
    num_layers: int = 1,
    draft_vocab_size: int = 8192,
    layers: Layers = AUTO,
    num_anchors: int = 64,
    gamma: float = 4.0,
    intermediate_size: int = 0,
    mask_token_id: int = -1,
    start: str = "",
) -> BlockTraining:
    """Drafts block_size - 1 tokens. A mask token of -1 stands for the rarest token of the data. A
    folder ``start`` holds a head that is trained on; the options of its shape are then its own."""
    loss = BlockLoss(gamma=gamma)
    if start:
        weights = _started(start, "dflash", ground.target)
    else:
        shape = _Shape(num_layers, draft_vocab_size, layers, intermediate_size, mask_token_id)
        weights = _built(ground, shape, {"block_size": block_size})
    return _training(weights, ground, loss, num_anchors)


def _dspark(
    ground: Ground,
    *,
    block_size: int = 6,
    num_layers: int = 1,
    draft_vocab_size: int = 8192,
    layers: Layers = AUTO,
    markov_rank: int = 64,
    num_anchors: int = 64,
    gamma: float = 4.0,
    kl: float = 0.1,
    tv: float = 0.9,
    confidence: float = 1.0,
    intermediate_size: int = 0,
    mask_token_id: int = -1,
    start: str = "",
) -> BlockTraining:
    """Drafts block_size tokens. A mask token of -1 stands for the rarest token of the data. A
    folder ``start`` holds a head that is trained on; the options of its shape are then its own."""
    loss = BlockLoss(kl, tv, confidence, gamma)
    settings = {
        "block_size": block_size,
        "sample_from_anchor": True,
        "markov_rank": markov_rank,
        "has_confidence": True,
        "confidence_reads_markov": markov_rank > 0,
    }
    if start:
        weights = _started(start, "dspark", ground.target)
    else:
        shape = _Shape(num_layers, draft_vocab_size, layers, intermediate_size, mask_token_id)
        weights = _built(ground, shape, settings)
    return _training(weights, ground, loss, num_anchors)


def _training(
    weights: tuple[BlockNetwork, DraftVocabulary],
    ground: Ground,
    loss: BlockLoss,
    num_anchors: int = 64,
) -> BlockTraining:
    return BlockTraining(
        *weights, ground.target, loss, num_anchors, ground.seed, ground.name_of_target
    )


def _started(folder: str, kind: str, target: HFModel) -> tuple[BlockNetwork, DraftVocabulary]:
    """The network and vocabulary of a head that is trained on."""
    head = load_block(folder)
    head.check(target)
    if head.kind != kind:
        raise InvalidParameterError(f"start={folder}: a head of kind {head.kind!r}, not {kind!r}")
    return head.network.float(), head.vocabulary


class _Shape(NamedTuple):
    """Options that all block heads share."""

    num_layers: int
    draft_vocab_size: int
    layers: Layers
    intermediate_size: int
    mask_token_id: int


def _built(
    ground: Ground, shape: _Shape, settings: Mapping[str, Any]
) -> tuple[BlockNetwork, DraftVocabulary]:
    """A network whose layers have the target's shape, and its vocabulary. Output head and final
    norm start as the target's, and the context as the last of the layers read."""
    target = ground.target
    if shape.num_layers < 1:
        raise InvalidParameterError(f"num_layers={shape.num_layers}: must be at least 1")
    size = min(shape.draft_vocab_size, target.num_tokens)
    vocabulary = DraftVocabulary.most_frequent(ground.counts_V, size)
    mask_token_id = shape.mask_token_id
    if mask_token_id == -1:
        mask_token_id = rarest_token(ground.counts_V)
    layers = layer_shape(target, shape.intermediate_size)
    config = BlockConfig(
        Qwen3Config(**layers, num_hidden_layers=shape.num_layers, tie_word_embeddings=False),
        mask_token_id=mask_token_id,
        target_layers=shape.layers.of(target, default_layers(target.num_layers)),
        draft_vocab_size=size,
        target_hidden_size=layers["hidden_size"],
        **settings,
    )
    torch.manual_seed(ground.seed)
    network = BlockNetwork(config).float()
    network.reset_parameters()
    _start_from(network, target, vocabulary)
    return network, vocabulary


@torch.no_grad()
def _start_from(network: BlockNetwork, target: HFModel, vocabulary: DraftVocabulary) -> None:
    output = network.lm_head
    if output is not None:
        output.weight.copy_(Teacher(target, vocabulary).weight_DH)
    copy_final_norm(network.norm, target)
    read_last_layer(network.fc)


def _calibrated(folder: Path, ground: Ground, states: States) -> None:
    """Calibrates the confidence of the head in a folder by samples that were kept apart."""
    head = load_block(folder)
    if not head.config.has_confidence:
        return
    device = ground.target.device
    training = _training((head.network.to(device), head.vocabulary), ground, BlockLoss())
    batches = StateBatches(states, 4, 0, device)
    training.calibrate(batches(step) for step in range(batches.per_epoch))
    training.save(folder)


DFLASH = HeadKind(
    "dflash",
    "A parallel head that drafts a block of tokens in one pass (DFlash).",
    "dflash",
    _layers,
    _dflash,
)
DSPARK = HeadKind(
    "dspark",
    "The same with a correction by the preceding token and a confidence per token (DSpark).",
    "dspark",
    _layers,
    _dspark,
    _calibrated,
)
