"""Trains DFlash and DSpark heads: many blocks of each text in one pass.

A block starts after an anchor, a random token whose successor the target wrote. Its slots read
what they read when drafting: the target's hidden states of the tokens before the anchor, the
anchor's embedding, and the mask token's. All blocks of a text pass the network together:

    keys      [ the text's tokens | block 1 | block 2 | … ]
    a slot    attends to the text's tokens before its anchor, and to its own block
    slot k    predicts the k-th token after the anchor, given the true one before it (DSpark);
              counts as long as the target wrote the tokens up to it

``block_loss.py`` has the losses. The anchors follow from the seed and the number of batches seen,
which is saved with the weights, so a resumed run draws the same.

Legend: B rows, T tokens, A blocks of a row, N slots of a block, K slots that predict a token, H
width of the head, D draft vocabulary, S keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockNetwork
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.formats.block import save_block
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.block_loss import BlockLoss, acceptance
from outrider.train.heads.calibrate import temperature_of
from outrider.train.heads.counted import CountedNetwork
from outrider.train.heads.teacher import Teacher


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


class BlockTraining:
    """A block head in training.

    Args:
        network: the weights, in float32.
        vocabulary: the draft vocabulary.
        target: the frozen target.
        loss: what is minimised.
        num_anchors: most blocks of a row.
        seed: of the anchors.
        target_name: what a saved head calls the target.
    """

    def __init__(
        self,
        network: BlockNetwork,
        vocabulary: DraftVocabulary,
        target: HFModel,
        loss: BlockLoss,
        num_anchors: int = 64,
        seed: int = 0,
        target_name: str | None = None,
    ) -> None:
        self.counted = CountedNetwork(network)
        self.network = network
        self.vocabulary = vocabulary
        self.target = target
        self.block_loss = loss
        self.num_anchors = num_anchors
        self.seed = seed
        self.target_name = target_name
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
        architectures = getattr(self.target.module.config, "architectures", None) or ()
        save_block(self.head(), folder, self.target_name, architectures)

    def _logits(self, h_NH: Tensor, previous_N: Tensor) -> Tensor:
        output = self.network.lm_head
        logits_ND = self.teacher.outputs(h_NH) if output is None else output(h_NH)
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
