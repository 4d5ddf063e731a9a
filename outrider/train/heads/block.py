"""Trains DFlash and DSpark heads: many blocks of each text in one pass.

A block starts behind an anchor, a random token whose successor the target wrote. Its slots read
what they read when drafting: the target's hidden states of the tokens before the anchor, the
anchor's embedding, and the mask token's. All blocks of a text pass the network together:

    keys      [ the text's tokens | block 1 | block 2 | … ]
    a slot    attends to the text's tokens before its anchor, and to its own block
    slot k    predicts the k-th token behind the anchor, given the true one before it (DSpark);
              counts as long as the target wrote the tokens up to it

``block_loss.py`` has the losses. The anchors follow from the seed and the number of batches seen,
which is saved with the weights, so a resumed run draws the same.

Legend: B rows, T tokens, A blocks of a row, N slots of a block, K slots that predict a token, H
width of the head, D draft vocabulary, S keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import Qwen3Config

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockConfig, BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_network import default_layers
from outrider.drafters.heads.formats.block import load_block, save_block
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatch, StateBatches
from outrider.train.heads.block_loss import BlockLoss, acceptance
from outrider.train.heads.calibrate import temperature_of
from outrider.train.heads.kind import Ground, HeadKind
from outrider.train.heads.layers import Layers
from outrider.train.heads.states import States
from outrider.train.heads.teacher import Teacher

AUTO = Layers()
_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
"""Norms that multiply by their weight, as the head's does; Gemma's multiply by 1 + weight."""


class Anchors(NamedTuple):
    """Where blocks start.

    Attributes:
        token_BA: number of the anchor in its row.
        exists_BA: whether the block counts; a row may have fewer anchors than another.
    """

    token_BA: Tensor
    exists_BA: Tensor


class Predictions(NamedTuple):
    """The slots that count, of all rows and blocks.

    Attributes:
        p_logits_ND: the target's logits over the draft vocabulary.
        log_norm_N: log Σ exp of its logits over all tokens.
        q_logits_ND: the head's logits.
        slot_N: number of the slot in its block, from 0.
        confidence_N: logits of the head's confidence; None without one.
    """

    p_logits_ND: Tensor
    log_norm_N: Tensor
    q_logits_ND: Tensor
    slot_N: Tensor
    confidence_N: Tensor | None


class CountedNetwork(nn.Module):
    """The weights in training, and how many batches they have seen.

    Args:
        network: the weights.
    """

    num_seen: Tensor

    def __init__(self, network: BlockNetwork) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))


class BlockTraining:
    """A block head in training.

    Args:
        network: the weights, in float32.
        vocabulary: the draft vocabulary.
        target: the frozen target.
        loss: what is minimised.
        num_anchors: most blocks of a row.
        seed: of the anchors.
    """

    def __init__(
        self,
        network: BlockNetwork,
        vocabulary: DraftVocabulary,
        target: HFModel,
        loss: BlockLoss,
        num_anchors: int = 64,
        seed: int = 0,
    ) -> None:
        self.counted = CountedNetwork(network)
        self.network = network
        self.vocabulary = vocabulary
        self.target = target
        self.block_loss = loss
        self.num_anchors = num_anchors
        self.seed = seed
        self.teacher = Teacher(target, vocabulary)
        self._embedding_VH = target.module.get_input_embeddings().weight

    @property
    def module(self) -> nn.Module:
        return self.counted

    def loss(self, batch: StateBatch) -> Tensor:
        """The loss of a batch at new random anchors."""
        anchors = self.anchors(batch, int(self.counted.num_seen))
        self.counted.num_seen += 1
        return self.block_loss(*self.predictions(batch, anchors))

    def anchors(self, batch: StateBatch, number: int) -> Anchors:
        """Random anchors of each row: tokens whose successor the target wrote.

        Args:
            batch: the rows.
            number: of the batch, which with the seed decides the anchors.
        """
        may_BT = batch.answers_BT[:, 1:]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order_BT = torch.rand(may_BT.shape, generator=generator).to(may_BT.device)
        num = min(self.num_anchors, may_BT.shape[1])
        order_BA, token_BA = order_BT.masked_fill(~may_BT, 2.0).topk(num, largest=False)
        return Anchors(token_BA, order_BA < 1.5)

    def outputs(self, batch: StateBatch, anchors: Anchors) -> Tensor:
        """The network's outputs at the slots that predict, (B, A, K, H)."""
        config, network = self.network.config, self.network
        B, T = batch.tokens_BT.shape
        A, N = anchors.token_BA.shape[1], config.block_size
        first_BA1 = anchors.token_BA[..., None]
        tokens_BAN = torch.full((B, A, N), config.mask_token_id, device=first_BA1.device)
        tokens_BAN[..., 0] = batch.tokens_BT.gather(1, anchors.token_BA)
        noise_BMH = embedding(tokens_BAN.flatten(1), self._embedding_VH).float()
        step_N = torch.arange(N, device=first_BA1.device)
        position_BM = (first_BA1 + step_N).flatten(1)
        position_BT = torch.arange(T, device=first_BA1.device).expand(B, T)
        context_BTH = network.context(batch.hidden_BTF)
        before = network.context_keys_values(context_BTH, position_BT)

        def remember(key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            key_BATC, value_BATC = before[layer]
            return torch.cat([key_BATC, key], 2), torch.cat([value_BATC, value], 2)

        mask_B1MS = _mask(anchors.token_BA, T, N)[:, None]
        h_BMH = network(noise_BMH, position_BM, remember, mask_B1MS)
        return h_BMH.view(B, A, N, -1)[:, :, config.first_slot :]

    def predictions(self, batch: StateBatch, anchors: Anchors) -> Predictions:
        """What the slots that count predict, and what the target says there."""
        h_BAKH = self.outputs(batch, anchors)
        K, T = h_BAKH.shape[2], batch.tokens_BT.shape[1]
        slot_K = torch.arange(K, device=h_BAKH.device)
        before_BAK = anchors.token_BA[..., None] + slot_K
        inside_BAK = before_BAK + 1 < T
        before_BAK = before_BAK.clamp(max=T - 2)
        counts_BAK = _at(batch.answers_BT, before_BAK + 1) & inside_BAK
        counts_BAK = (counts_BAK & anchors.exists_BA[..., None]).long().cumprod(2).bool()
        h_NH, previous_N = h_BAKH[counts_BAK], _at(batch.tokens_BT, before_BAK)[counts_BAK]
        row_BAK = torch.arange(len(h_BAKH), device=h_BAKH.device)[:, None, None]
        final_NH = batch.final_BTH[row_BAK, before_BAK][counts_BAK]
        return Predictions(
            self.teacher.logits(final_NH),
            _at(batch.log_norm_BT, before_BAK)[counts_BAK],
            self._logits(h_NH, previous_N),
            slot_K.expand_as(counts_BAK)[counts_BAK],
            self._confidence(h_NH, previous_N),
        )

    @torch.no_grad()
    def calibrate(self, held_out: Iterable[StateBatch]) -> float:
        """Fits the temperature of the confidence to data that was not trained on, and divides the
        weights by it; returns it. The head must have a confidence.

        Raises:
            ValueError: data without a token that the target wrote.
        """
        head = self.network.confidence_head
        assert head is not None
        logits, targets = [], []
        for number, batch in enumerate(held_out):
            found = self.predictions(batch, self.anchors(batch, number))
            assert found.confidence_N is not None
            logits.append(found.confidence_N)
            log_p_ND = found.p_logits_ND - found.log_norm_N[:, None]
            targets.append(acceptance(log_p_ND, found.q_logits_ND))
        if not logits or not sum(map(len, logits)):
            raise ValueError("the held-out data has no token that the target wrote: give more")
        temperature = temperature_of(torch.cat(logits), torch.cat(targets))
        head.proj.weight.div_(temperature)
        head.proj.bias.div_(temperature)
        return temperature

    def head(self) -> BlockHead:
        return BlockHead(self.network, self.vocabulary, "the head in training")

    def save(self, folder: Path) -> None:
        config = self.target.module.config
        name = getattr(self.target.module, "name_or_path", None) or None
        save_block(self.head(), folder, name, getattr(config, "architectures", None) or ())

    def _logits(self, h_NH: Tensor, previous_N: Tensor) -> Tensor:
        output = self.network.lm_head
        weight_DH = self.teacher.weight_DH if output is None else output.weight
        logits_ND = linear(h_NH, weight_DH, self.teacher.bias_D if output is None else None)
        correction_ND = self.network.correction(previous_N)
        return logits_ND if correction_ND is None else logits_ND + correction_ND

    def _confidence(self, h_NH: Tensor, previous_N: Tensor) -> Tensor | None:
        if self.network.confidence_head is None:
            return None
        return self.network.confidence_logits(h_NH, previous_N)


def _mask(anchor_BA: Tensor, num_tokens: int, num_slots: int) -> Tensor:
    """Which keys each slot of all blocks attends to, (B, A·N, T + A·N)."""
    A, device = anchor_BA.shape[1], anchor_BA.device
    anchor_BM = anchor_BA.repeat_interleave(num_slots, 1)
    before_BMT = torch.arange(num_tokens, device=device) < anchor_BM[..., None]
    block_M = torch.arange(A, device=device).repeat_interleave(num_slots)
    same_MM = block_M[:, None] == block_M
    return torch.cat([before_BMT, same_MM.expand(len(anchor_BA), -1, -1)], 2)


def _at(value_BT: Tensor, token_BAK: Tensor) -> Tensor:
    """The values at these tokens of each row, (B, A, K)."""
    return value_BT.gather(1, token_BAK.flatten(1)).view_as(token_BAK)


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
        network, vocabulary = _started(start, "dflash", ground.target)
        return BlockTraining(network, vocabulary, ground.target, loss, num_anchors, ground.seed)
    shape = _Shape(num_layers, draft_vocab_size, layers, intermediate_size, mask_token_id)
    network, vocabulary = _built(ground, shape, {"block_size": block_size})
    return BlockTraining(network, vocabulary, ground.target, loss, num_anchors, ground.seed)


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
    if start:
        network, vocabulary = _started(start, "dspark", ground.target)
        return BlockTraining(network, vocabulary, ground.target, loss, num_anchors, ground.seed)
    settings = {
        "block_size": block_size,
        "sample_from_anchor": True,
        "markov_rank": markov_rank,
        "has_confidence": True,
        "confidence_reads_markov": markov_rank > 0,
    }
    shape = _Shape(num_layers, draft_vocab_size, layers, intermediate_size, mask_token_id)
    network, vocabulary = _built(ground, shape, settings)
    return BlockTraining(network, vocabulary, ground.target, loss, num_anchors, ground.seed)


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
        rarest = ground.counts_V == ground.counts_V.min()
        mask_token_id = int(rarest.nonzero()[-1])
    text = target.module.config.get_text_config()
    config = BlockConfig(
        _layer_of(text, shape.num_layers, shape.intermediate_size),
        mask_token_id=mask_token_id,
        target_layers=shape.layers.of(target, default_layers(target.num_layers)),
        draft_vocab_size=size,
        target_hidden_size=text.hidden_size,
        **settings,
    )
    torch.manual_seed(ground.seed)
    network = BlockNetwork(config).float()
    network.reset_parameters()
    _start_from(network, target, vocabulary)
    return network, vocabulary


def _layer_of(text: Any, num_layers: int, intermediate_size: int) -> Qwen3Config:
    """Qwen3 layers of the target's shape."""
    heads = text.num_attention_heads
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or text.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters=dict(rope),
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def _start_from(network: BlockNetwork, target: HFModel, vocabulary: DraftVocabulary) -> None:
    output, H = network.lm_head, network.config.layers.hidden_size
    if output is not None:
        output.weight.copy_(Teacher(target, vocabulary).weight_DH)
    norm: Any = getattr(target.module.get_decoder(), "norm", None)
    if type(norm).__name__ in _PLAIN_NORMS:
        network.norm.weight.copy_(norm.weight)
    network.fc.weight[:, -H:] += torch.eye(H)


def _calibrated(folder: Path, target: HFModel, states: States) -> None:
    """Calibrates the confidence of the head in a folder by samples that were kept apart."""
    head = load_block(folder)
    if not head.config.has_confidence:
        return
    training = BlockTraining(head.network.to(target.device), head.vocabulary, target, BlockLoss())
    batches = StateBatches(states, 4, 0, target.device)
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
