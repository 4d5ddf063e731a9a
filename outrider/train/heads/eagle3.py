"""Trains EAGLE-3 heads by the training-time test: the head drafts during training as it will later.

Li, Wei, Zhang and Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, section 3. https://arxiv.org/abs/2503.01840

Step i of the test is draft step i + 1 of a round that starts at every position t at once:

    reads      (feature, x_t+1+i),   feature = the target's at t for i = 0, else step i-1's output
    attends    to the slots up to t of step 0, and to its own slots of steps 1 … i
    predicts   x_t+2+i; its teacher is the target after x_t+1+i
    loss       Σ_i decay^i · mean divergence of step i, over positions whose x_t+2+i the target
               wrote, weighted by the teacher's mass (``teacher.py``)

Tokens are those of the data at every step, so that the teacher is known. The authors' code counts
positions only where the target's most probable token is in the draft vocabulary; the weight here is
the probability that any of its tokens is.

Legend: B rows, T tokens, S slots of a step (T - 1), I steps, N positions of all rows that count, C
positions of a chunk of them, H width of the head, F width of the layers read, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.drafters.heads.eagle3_network import (
    Eagle3Config,
    Eagle3Network,
    FirstLayer,
    default_layers,
)
from outrider.drafters.heads.formats.eagle3 import load_eagle3, save_eagle3
from outrider.drafters.heads.head import check_target
from outrider.runtime import HFModel
from outrider.runtime.kernels.build import find_compiler
from outrider.train.fused_linear_loss import fused_linear_loss
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.initial import (
    copy_final_norm,
    copy_layer,
    copy_output_layer,
    layer_shape,
    read_last_layer,
)
from outrider.train.heads.kind import Ground, HeadKind
from outrider.train.heads.layers import Layers
from outrider.train.heads.teacher import Teacher
from outrider.train.losses import DIVERGENCES

DivergenceName = Literal["forward-kl", "reverse-kl", "js", "tv", "lk", "nla"]
AUTO = Layers()


class Eagle3Training:
    """An EAGLE-3 head in training.

    Args:
        network: the weights, in float32.
        vocabulary: the draft vocabulary.
        target: the frozen target.
        divergence: of the head from the teacher.
        ttt_length: steps of the training-time test.
        decay: weight of a step relative to the one before.
        embedding: the head's own embeddings, which are not trained; None where it has the target's.
        compile: whether the divergence is compiled, which takes a C++ compiler on a CPU.
    """

    def __init__(
        self,
        network: Eagle3Network,
        vocabulary: DraftVocabulary,
        target: HFModel,
        divergence: DivergenceName = "forward-kl",
        ttt_length: int = 5,
        decay: float = 0.8,
        embedding: nn.Embedding | None = None,
        compile: bool = False,
    ) -> None:
        self.module: nn.Module = network
        self.network = network
        self.vocabulary = vocabulary
        self.divergence = DIVERGENCES[divergence]
        if compile:
            self.divergence = torch.compile(self.divergence, dynamic=True)
        self.ttt_length = ttt_length
        self.decay = decay
        self.teacher = Teacher(target, vocabulary)
        self._own = None if embedding is None else embedding.requires_grad_(False)
        self._embedding: nn.Module = self._own or target.module.get_input_embeddings()

    def loss(self, batch: StateBatch) -> Tensor:
        """Σ_i decay^i times the mean divergence of step i."""
        row_N, label_N = batch.answers_BT.nonzero(as_tuple=True)
        row_N, label_N = row_N[label_N >= 2], label_N[label_N >= 2]
        final_NH = batch.final_BTH[row_N, label_N - 1]
        mass_N = self.teacher.mass_after(final_NH, batch.log_norm_BT[row_N, label_N - 1])
        step_I = torch.arange(self.ttt_length, device=label_N.device)
        slot_NI = label_N[:, None] - 2 - step_I
        mass_NI = mass_N[:, None] * (slot_NI >= 0)
        total_I = mass_NI.sum(0)
        weight_NI = self.decay**step_I * mass_NI / torch.where(total_I == 0, 1.0, total_I)
        outputs_IBSH = torch.stack(list(self.steps(batch)))
        _, B, S, H = outputs_IBSH.shape
        number_NI = (step_I * B + row_N[:, None]) * S + slot_NI.clamp(min=0)
        output_NIH = outputs_IBSH.view(-1, H)[number_NI.flatten()].view(*number_NI.shape, H)

        def loss_of(q_CID: Tensor, chunk: slice) -> Tensor:
            p_CD = self.teacher.logits(final_NH[chunk])
            loss_CI = self.divergence(p_CD[:, None], q_CID)
            weight_CI = weight_NI[chunk]
            return (weight_CI * loss_CI.masked_fill(weight_CI == 0, 0.0)).sum()

        normed_NIH, weight_DH = self.network.normed(output_NIH), self.network.lm_head.weight
        return fused_linear_loss(normed_NIH, weight_DH, loss_of)

    def steps(self, batch: StateBatch) -> Iterator[Tensor]:
        """The head's outputs at every slot, (B, S, H), step by step. Slots near a row's end, whose
        tokens are padding, are arbitrary."""
        with torch.no_grad():
            embedded_BTH = self._embedding(batch.tokens_BT).float()
        return training_time_test(self.network, embedded_BTH, batch.hidden_BTF, self.ttt_length)

    def head(self) -> Eagle3Head:
        return Eagle3Head(self.network, self.vocabulary, "the head in training", self._own)

    def save(self, folder: Path) -> None:
        save_eagle3(self.head(), folder)


def training_time_test(
    network: Eagle3Network, embedded_BTH: Tensor, hidden_BTF: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """A head's outputs at every slot, (B, S, H), step by step. At the last i slots of step i, whose
    tokens lie after the end, they are arbitrary.

    Args:
        network: the head's.
        embedded_BTH: embeddings of the tokens.
        hidden_BTF: the target's hidden states at them.
        num_steps: of the test.
    """
    B, S = len(embedded_BTH), embedded_BTH.shape[1] - 1
    feature_BSH = network.fuse(hidden_BTF[:, :S])
    cache = DynamicCache()
    slots_S = torch.arange(S, device=embedded_BTH.device)
    own_SS = torch.eye(S, dtype=torch.bool, device=embedded_BTH.device)
    mask_SS = slots_S[:, None] >= slots_S
    for i in range(num_steps):
        read_BSH = nn.functional.pad(embedded_BTH[:, 1 + i :], (0, 0, 0, i))[:, :S]
        positions_BS = (slots_S + i).expand(B, S)
        feature_BSH = network(read_BSH, feature_BSH, positions_BS, mask_SS[None, None], cache)
        yield feature_BSH
        mask_SS = torch.cat([mask_SS, own_SS], 1)


def layers_read(target: HFModel, values: Mapping[str, Any]) -> tuple[int, ...]:
    """The target's layers whose hidden states a head reads, from the options of its kind."""
    if values["start"]:
        return load_eagle3(values["start"], target).target_layers
    chosen: Layers = values["layers"]
    return chosen.of(target, default_layers(target.num_layers))


def _build(
    ground: Ground,
    *,
    draft_vocab_size: int = 8192,
    layers: Layers = AUTO,
    ttt_length: int = 5,
    decay: float = 0.8,
    divergence: DivergenceName = "forward-kl",
    norm_before_fc: bool = True,
    norm_output: bool = True,
    norm_before_residual: bool = True,
    intermediate_size: int = 0,
    from_layer: int = 0,
    start: str = "",
    compile: bool = False,
) -> Eagle3Training:
    """A head whose decoder layer has the target's shape; its output layer starts as the target's,
    flattened, its final norm as the target's, and ``fc`` so that the feature begins as the last of
    the layers read. The decoder layer starts as the target's of the number ``from_layer``, or with
    random weights.
    Or the head in the folder ``start``, trained on; the options of its shape are then its own."""
    if ttt_length < 1:
        raise InvalidParameterError(f"ttt_length={ttt_length}: must be at least 1")
    if not 0 < decay <= 1:
        raise InvalidParameterError(f"decay={decay}: must be above 0 and at most 1")
    target = ground.target
    if compile and target.device.type == "cpu" and find_compiler() is None:
        raise InvalidParameterError(
            "compile=true: there is no C++ compiler; install one, such as g++, or leave it out"
        )
    if start:
        head = load_eagle3(start, target)
        check_target(head, target)
        if head.kind != "eagle3":
            raise InvalidParameterError(
                f"start={start}: a head of kind {head.kind!r}, not 'eagle3'"
            )
        return Eagle3Training(
            head.network.float(),
            head.vocabulary,
            target,
            divergence,
            ttt_length,
            decay,
            head.embedding,
            compile,
        )
    shape = Shape(
        draft_vocab_size,
        layers,
        norm_before_fc,
        norm_output,
        norm_before_residual,
        intermediate_size,
        from_layer,
        ttt_length,
    )
    network, vocabulary = new_network(ground, shape)
    return Eagle3Training(
        network, vocabulary, target, divergence, ttt_length, decay, compile=compile
    )


class Shape(NamedTuple):
    """Options of a new head, as users name them; ``draft_length`` is that of its drafts."""

    draft_vocab_size: int
    layers: Layers
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    intermediate_size: int
    from_layer: int
    draft_length: int
    num_layers: int = 1
    mask_token_id: int | None = None


def new_network(ground: Ground, shape: Shape) -> tuple[Eagle3Network, DraftVocabulary]:
    """A network whose decoder layers have the target's shape, and its draft vocabulary. Its first
    weights are those that ``_build`` tells of."""
    target = ground.target
    if shape.num_layers < 1:
        raise InvalidParameterError(f"num_layers={shape.num_layers}: must be at least 1")
    size = min(shape.draft_vocab_size, target.num_tokens)
    vocabulary = DraftVocabulary.most_frequent(ground.counts_V, size)
    layer = layer_shape(target, shape.intermediate_size)
    torch.manual_seed(ground.seed)
    network = Eagle3Network(
        Eagle3Config(
            LlamaConfig(**layer, num_hidden_layers=shape.num_layers),
            size,
            shape.layers.of(target, default_layers(target.num_layers)),
            layer["hidden_size"],
            norm_before_residual=shape.norm_before_residual,
            norm_before_fc=shape.norm_before_fc,
            norm_output=shape.norm_output,
            target_name=ground.name_of_target,
            target_architectures=tuple(target.module.config.architectures or ()),
            num_speculative_tokens=shape.draft_length,
            mask_token_id=shape.mask_token_id,
        )
    ).float()
    _start_from(network, target, Teacher(target, vocabulary), shape.from_layer)
    return network, vocabulary


@torch.no_grad()
def _start_from(network: Eagle3Network, target: HFModel, teacher: Teacher, from_layer: int) -> None:
    """Initialises the output layer by the target's, the final norm as the target's, ``fc`` so that
    the feature begins as the last of the layers read, and the first decoder layer as the target's
    of that number."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    copy_output_layer(network.lm_head, teacher.weight_DH)
    copy_final_norm(network.norm, target)
    read_last_layer(network.fc)
    if from_layer:
        first = network.layers[0]
        assert isinstance(first, FirstLayer)
        copy_layer(first, target, from_layer)


EAGLE3 = HeadKind(
    "eagle3",
    "An autoregressive head of one decoder layer on three layers of the target (EAGLE-3).",
    "eagle3",
    layers_read,
    _build,
)
