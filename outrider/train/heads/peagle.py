"""Trains P-EAGLE heads: the drafts of many anchors of each text in one pass.

Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", 2026, section 3.
https://arxiv.org/abs/2602.01469. ``drafters/heads/peagle.py`` has the head.

    keys            [ the text's slots, as at drafting | masks of anchor 1, 2, … ]
    a text's slot   attends to the slots up to itself                  predicts x_t+2
    mask d of t     attends to the text's slots up to t, and to        predicts x_t+2+d
                    masks 1 … d of the same anchor
    loss            Σ_d 1/G · mean divergence at depth d, over positions whose token the target
                    wrote, weighted by the teacher's mass (``teacher.py``); d = 0 is the text

Deep masks are fewer, which saves most of the attention (conditional drop-token sampling): the
anchors of a row come in random order, and depth d takes the first max(r^d, r_least) of them. So
a mask always has those before it. The anchors follow from the seed and the number of batches
seen, which is saved with the weights.

Legend: B rows, T tokens, S slots of the text (T - 1), A anchors of a row, M masks of a row, N
positions of all rows that count, C positions of a chunk of them, G depths, H width of the head, D
draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_network import Eagle3Network
from outrider.drafters.heads.formats.eagle3 import load_eagle3, save_eagle3
from outrider.drafters.heads.head import check_target
from outrider.drafters.heads.peagle import PEagleHead
from outrider.runtime import HFModel
from outrider.train.fused_linear_loss import fused_linear_loss
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.counted import CountedNetwork
from outrider.train.heads.eagle3 import AUTO, DivergenceName, Shape, layers_read, new_network
from outrider.train.heads.initial import rarest_token
from outrider.train.heads.kind import Ground, HeadKind
from outrider.train.heads.layers import Layers
from outrider.train.heads.teacher import Teacher
from outrider.train.losses import DIVERGENCES


class Retention(NamedTuple):
    """How many masks are trained.

    Attributes:
        num_anchors: most anchors of a row.
        ratio: r: the share of the anchors that has a mask at depth 1.
        least: the least share at any depth.
    """

    num_anchors: int = 64
    ratio: float = 0.7
    least: float = 0.2

    def at(self, depth: int, num_anchors: int) -> int:
        """Anchors that have a mask at a depth, of so many."""
        return int(num_anchors * max(self.ratio**depth, self.least))


USUAL = Retention()


class Masks(NamedTuple):
    """The masks of a batch.

    Attributes:
        anchor_BM: slot of the text that each follows.
        depth_M: from 1.
        exists_BM: whether it counts; a row may have fewer anchors than another.
    """

    anchor_BM: Tensor
    depth_M: Tensor
    exists_BM: Tensor


class PEagleTraining:
    """A P-EAGLE head in training.

    Args:
        network: the weights, in float32.
        vocabulary: the draft vocabulary.
        target: the frozen target.
        divergence: of the head from the teacher.
        retention: how many masks are trained.
        seed: of the anchors.
        embedding: the head's own embeddings, which are not trained; None where it has the target's.
    """

    def __init__(
        self,
        network: Eagle3Network,
        vocabulary: DraftVocabulary,
        target: HFModel,
        divergence: DivergenceName = "forward-kl",
        retention: Retention = USUAL,
        seed: int = 0,
        embedding: nn.Embedding | None = None,
    ) -> None:
        self.counted = CountedNetwork(network)
        self.network = network
        self.vocabulary = vocabulary
        self.divergence = DIVERGENCES[divergence]
        self.retention = retention
        self.seed = seed
        self.teacher = Teacher(target, vocabulary)
        self._own = None if embedding is None else embedding.requires_grad_(False)
        self._embedding: nn.Module = self._own or target.module.get_input_embeddings()

    @property
    def module(self) -> nn.Module:
        return self.counted

    def loss(self, batch: StateBatch) -> Tensor:
        """The mean divergence over depths, at new random anchors."""
        masks = self.masks(batch, int(self.counted.num_seen))
        self.counted.num_seen += 1
        output_BNH = self.outputs(batch, masks)
        S, device = batch.tokens_BT.shape[1] - 1, output_BNH.device
        depth_N = torch.cat([torch.zeros(S, dtype=torch.int64, device=device), masks.depth_M])
        slot_S = torch.arange(S, device=device).expand(len(output_BNH), S)
        label_BN = torch.cat([slot_S, masks.anchor_BM], 1) + depth_N + 2
        exists_BN = torch.cat([torch.ones_like(slot_S, dtype=torch.bool), masks.exists_BM], 1)
        exists_BN = exists_BN & (label_BN <= S)
        label_BN = label_BN.clamp(max=S)
        row_N, place_N = (exists_BN & batch.answers_BT.gather(1, label_BN)).nonzero(as_tuple=True)
        before_N = label_BN[row_N, place_N] - 1
        final_NH = batch.final_BTH[row_N, before_N]
        mass_N = self.teacher.mass_after(final_NH, batch.log_norm_BT[row_N, before_N])
        depth_N, G = depth_N[place_N], self.network.config.num_slots
        total_G = mass_N.new_zeros(G).index_add(0, depth_N, mass_N)
        weight_N = mass_N / (G * torch.where(total_G == 0, 1.0, total_G)[depth_N])

        def loss_of(q_CD: Tensor, chunk: slice) -> Tensor:
            loss_C = self.divergence(self.teacher.logits(final_NH[chunk]), q_CD)
            weight_C = weight_N[chunk]
            return (weight_C * loss_C.masked_fill(weight_C == 0, 0.0)).sum()

        normed_NH = self.network.normed(output_BNH[row_N, place_N])
        return fused_linear_loss(normed_NH, self.network.lm_head.weight, loss_of)

    def masks(self, batch: StateBatch, number: int) -> Masks:
        """The masks after random anchors of each row, whose own prediction the target wrote.

        Args:
            batch: the rows.
            number: of the batch, which with the seed decides the anchors.
        """
        may_BS = batch.answers_BT[:, 2:]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order_BS = torch.rand(may_BS.shape, generator=generator).to(may_BS.device)
        A = min(self.retention.num_anchors, may_BS.shape[1])
        order_BA, anchor_BA = order_BS.masked_fill(~may_BS, 2.0).topk(A, largest=False)
        nums = [self.retention.at(depth, A) for depth in range(1, self.network.config.num_slots)]
        return Masks(
            torch.cat([anchor_BA[:, :0], *(anchor_BA[:, :num] for num in nums)], 1),
            torch.cat(
                [torch.full((num,), depth) for depth, num in enumerate(nums, 1)]
                or [torch.zeros(0, dtype=torch.int64)]
            ).to(may_BS.device),
            torch.cat([order_BA[:, :0], *(order_BA[:, :num] for num in nums)], 1) < 1.5,
        )

    def outputs(self, batch: StateBatch, masks: Masks) -> Tensor:
        """The head's outputs at the text's slots, then at the masks, (B, S + M, H)."""
        network = self.network
        B, S = len(batch.tokens_BT), batch.tokens_BT.shape[1] - 1
        M = masks.anchor_BM.shape[1]
        assert network.config.mask_token_id is not None
        with torch.no_grad():
            mask_BM = torch.full_like(masks.anchor_BM, network.config.mask_token_id)
            tokens_BN = torch.cat([batch.tokens_BT[:, 1:], mask_BM], 1)
            embedded_BNH = self._embedding(tokens_BN).float()
        hidden_BMF = network.mask_hidden.expand(B, M, -1)
        feature_BNH = network.fuse(torch.cat([batch.hidden_BTF[:, :S], hidden_BMF], 1))
        slot_S = torch.arange(S, device=tokens_BN.device)
        position_BN = torch.cat([slot_S.expand(B, S), masks.anchor_BM + masks.depth_M], 1)
        mask_B1NN = _attended(slot_S, masks)[:, None]
        output_BNH: Tensor = network(
            embedded_BNH, feature_BNH, position_BN, mask_B1NN, DynamicCache()
        )
        return output_BNH

    def head(self) -> PEagleHead:
        return PEagleHead(self.network, self.vocabulary, "the head in training", self._own)

    def save(self, folder: Path) -> None:
        save_eagle3(self.head(), folder)


def _attended(slot_S: Tensor, masks: Masks) -> Tensor:
    """Which keys each slot of the text and each mask attends to, (B, S + M, S + M)."""
    anchor_BM, depth_M, _ = masks
    B, S = len(anchor_BM), len(slot_S)
    reach_BN = torch.cat([slot_S.expand(B, S), anchor_BM], 1)
    text_BNS = slot_S <= reach_BN[..., None]
    own_BMM = anchor_BM[:, :, None] == anchor_BM[:, None]
    own_BMM = own_BMM & (depth_M <= depth_M[:, None])
    none_BSM = own_BMM.new_zeros(B, S, len(depth_M))
    return torch.cat([text_BNS, torch.cat([none_BSM, own_BMM], 1)], 2)


def _build(
    ground: Ground,
    *,
    num_depths: int = 6,
    num_layers: int = 1,
    draft_vocab_size: int = 8192,
    layers: Layers = AUTO,
    num_anchors: int = 64,
    retention: float = 0.7,
    least_retention: float = 0.2,
    divergence: DivergenceName = "forward-kl",
    norm_before_fc: bool = True,
    norm_output: bool = True,
    norm_before_residual: bool = True,
    intermediate_size: int = 0,
    mask_token_id: int = -1,
    from_layer: int = 0,
    start: str = "",
) -> PEagleTraining:
    """Drafts num_depths tokens. A mask token of -1 stands for the rarest token of the data. Weights
    begin as those of an EAGLE-3 head. A folder ``start`` holds a head that is trained on; the
    options of its shape are then its own."""
    if num_depths < 1:
        raise InvalidParameterError(f"num_depths={num_depths}: must be at least 1")
    if num_anchors < 1:
        raise InvalidParameterError(f"num_anchors={num_anchors}: must be at least 1")
    for name, share in (("retention", retention), ("least_retention", least_retention)):
        if not 0 <= share <= 1:
            raise InvalidParameterError(f"{name}={share}: must be from 0 to 1")
    target, kept = ground.target, Retention(num_anchors, retention, least_retention)
    if start:
        head = load_eagle3(start, target)
        check_target(head, target)
        if head.kind != "peagle":
            raise InvalidParameterError(
                f"start={start}: a head of kind {head.kind!r}, not 'peagle'"
            )
        network, own = head.network.float(), head.embedding
        return PEagleTraining(network, head.vocabulary, target, divergence, kept, ground.seed, own)
    shape = Shape(
        draft_vocab_size,
        layers,
        norm_before_fc,
        norm_output,
        norm_before_residual,
        intermediate_size,
        from_layer,
        num_depths,
        num_layers,
        rarest_token(ground.counts_V) if mask_token_id == -1 else mask_token_id,
    )
    network, vocabulary = new_network(ground, shape)
    return PEagleTraining(network, vocabulary, target, divergence, kept, ground.seed)


PEAGLE = HeadKind(
    "peagle",
    "An EAGLE-3 head that drafts all of its tokens in one pass (P-EAGLE).",
    "peagle",
    layers_read,
    _build,
)
