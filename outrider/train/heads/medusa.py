"""Trains Medusa heads: every head at every position at once.

Cai et al., "Medusa", ICML 2024, section 2.2.1. https://arxiv.org/abs/2401.10774

    loss = Σ_i λ^i · mean of D_i over positions t whose x_{t+1+i} the target wrote,   i = 1, 2, …
    D_i  = -log q_i(x_{t+1+i})        labels="tokens", the paper's cross-entropy
           KL(p_{t+i} ‖ q_i)          labels="target"

q_i is head i at the hidden state of t, p_{t+i} the target's distribution of the same token given
all tokens before it. Both have the same gradient in expectation over outputs of the target at
temperature 1; that of KL has less noise. λ = 0.8 is the paper's; the released code has 1.

With a reduced vocabulary tokens outside do not count, and KL is weighted by the target's mass
inside (``teacher.py``).

Legend: B rows, T tokens, N positions of all rows that count, H width of the target, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.formats.medusa import load_medusa, save_medusa
from outrider.drafters.heads.head import check_target
from outrider.drafters.heads.medusa import MedusaHead
from outrider.drafters.heads.medusa_network import MedusaConfig, MedusaNetwork
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.kind import Ground, HeadKind
from outrider.train.heads.teacher import Teacher
from outrider.train.losses import forward_kl, weighted_mean

Labels = Literal["target", "tokens"]


class MedusaTraining:
    """Medusa heads in training.

    Args:
        network: the weights, in float32.
        vocabulary: the draft vocabulary.
        target: the frozen target.
        decay: λ.
        labels: what the heads are compared with.
        target_name: what saved heads call the target.
    """

    def __init__(
        self,
        network: MedusaNetwork,
        vocabulary: DraftVocabulary,
        target: HFModel,
        decay: float = 0.8,
        labels: Labels = "target",
        target_name: str | None = None,
    ) -> None:
        self.network = network
        self.vocabulary = vocabulary
        self.target = target
        self.decay = decay
        self.labels = labels
        self.target_name = target_name
        self.teacher = Teacher(target, vocabulary)
        ids_D = vocabulary.target_ids_D.to(target.device)
        self._draft_id_V = torch.full((vocabulary.num_tokens,), -1, device=target.device)
        self._draft_id_V[ids_D] = torch.arange(len(ids_D), device=target.device)

    @property
    def module(self) -> nn.Module:
        return self.network

    def loss(self, batch: StateBatch) -> Tensor:
        """Σ_i λ^i times the mean loss of head i."""
        total = torch.zeros((), device=batch.final_BTH.device)
        for i in range(1, self.network.config.num_heads + 1):
            if batch.tokens_BT.shape[1] > 1 + i:
                total = total + self.decay**i * self._loss_of(batch, i)
        return total

    def head(self) -> MedusaHead:
        return MedusaHead(self.network, self.vocabulary, "the heads in training")

    def save(self, folder: Path) -> None:
        save_medusa(self.head(), folder, self.target_name)

    def _loss_of(self, batch: StateBatch, i: int) -> Tensor:
        """The mean loss of head i, from 1, which predicts x_{t+1+i} at t."""
        counts_BN = batch.answers_BT[:, 1 + i :]
        num = counts_BN.shape[1]
        q_ND = self.network(batch.final_BTH[:, :num][counts_BN], i - 1)
        if self.labels == "tokens":
            label_N = self._draft_id_V[batch.tokens_BT[:, 1 + i :][counts_BN]]
            loss_N = cross_entropy(q_ND.float(), label_N.clamp(min=0), reduction="none")
            return weighted_mean(loss_N, label_N >= 0)
        before_BN = slice(i, i + num)
        p_ND = self.teacher.logits(batch.final_BTH[:, before_BN][counts_BN])
        mass_N = self.teacher.mass(p_ND, batch.log_norm_BT[:, before_BN][counts_BN])
        return weighted_mean(forward_kl(p_ND, q_ND), mass_N)


def _layers(target: HFModel, values: Mapping[str, Any]) -> tuple[int, ...]:
    return (target.num_layers,)


def _build(
    ground: Ground,
    *,
    num_heads: int = 4,
    num_layers: int = 1,
    draft_vocab_size: int = 8192,
    decay: float = 0.8,
    labels: Labels = "target",
    start: str = "",
) -> MedusaTraining:
    """Other programs read heads that draft all tokens only: a draft_vocab_size of 0. A folder
    ``start`` holds heads that are trained on; the options of their shape are then their own."""
    if not 0 < decay <= 1:
        raise InvalidParameterError(f"decay={decay}: must be above 0 and at most 1")
    target, name = ground.target, ground.name_of_target
    if start:
        head = load_medusa(start, target)
        check_target(head, target)
        network = head.network.float()
        return MedusaTraining(network, head.vocabulary, target, decay, labels, name)
    num_tokens = target.num_tokens
    size = min(draft_vocab_size or num_tokens, num_tokens)
    vocabulary = DraftVocabulary.most_frequent(ground.counts_V, size)
    width = target.module.config.get_text_config().hidden_size
    config = MedusaConfig(num_heads, num_layers, width, num_tokens, size, target.num_layers)
    network = MedusaNetwork(config).float()
    training = MedusaTraining(network, vocabulary, target, decay, labels, name)
    network.start_from(training.teacher.weight_DH)
    return training


MEDUSA = HeadKind(
    "medusa",
    "One head per drafted token on the target's last hidden state (Medusa).",
    "medusa-lossless",
    _layers,
    _build,
)
