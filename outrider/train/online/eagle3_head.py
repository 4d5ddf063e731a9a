"""An EAGLE-3 head as the subject of an adaptation.

A sample is a stretch of an output: at each of its tokens the target's hidden states, the token's
embedding, and the target's distribution over the head's draft vocabulary. The head learns from it
by the training-time test (``train/heads/eagle3.py``), with what stands before the stretch left out:
positions matter by their differences only, and attention has less to attend to than it will have.

Legend: B rows, N nodes of a path, R recorded rows, T tokens of a sample, K top tokens, D draft
vocabulary, V vocabulary, H width of the head, F width of the layers read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.core import Round
from outrider.drafters.heads.eagle3 import Eagle3Head, Eagle3Model
from outrider.drafters.heads.eagle3_network import Eagle3Config, Eagle3Network
from outrider.drafters.heads.formats.eagle3 import save_eagle3
from outrider.engine import Engine
from outrider.engine.round_observer import RowRound
from outrider.runtime.weights import StagedWeights, plain_weights, staged
from outrider.train.heads.eagle3 import training_time_test
from outrider.train.online.samples import HeadSample, log_q_at, with_tail
from outrider.train.online.settings import Settings
from outrider.train.online.subject import Comparison

STEPS = 3
"""Steps of the training-time test."""
DECAY = 0.8
"""Weight of a step relative to the one before."""


class _Kept(NamedTuple):
    """What is kept of a position, as the fields of :class:`HeadSample`."""

    embedded_H: Tensor
    hidden_F: Tensor
    ids_K: Tensor
    log_p_K: Tensor
    log_mass: Tensor


class HeadRecorder:
    """Keeps hidden states, embeddings and the target's k most probable draft tokens.

    Args:
        model: the head, bound to its target.
        top_k: k.
    """

    def __init__(self, model: Eagle3Model, top_k: int) -> None:
        self._module = model.module
        self._num_tokens = model.head.vocabulary.size
        self._top_k = min(top_k, self._num_tokens)

    def num_positions(self, done: RowRound) -> int:
        """Those of all emitted tokens: a stretch must have no gap."""
        return min(done.accepted + 1, done.kept)

    def blocks(self, round_: Round, rows_R: Tensor, path_RN: Tensor) -> list[Tensor]:
        scores, rows_R1 = round_.scores, rows_R[:, None]
        assert scores.hidden_BNH is not None
        embedded_RNH = self._module.embedding(round_.draft.tokens_BN[rows_R1, path_RN])
        hidden_RNF = scores.hidden_BNH[rows_R1, path_RN]
        logits_RNV = scores.logits_BNV[rows_R1, path_RN].float()
        logits_RND = logits_RNV[..., self._module.vocabulary.target_ids_D]
        log_norm_RN = logits_RND.logsumexp(-1)
        top = logits_RND.topk(self._top_k, dim=-1)
        return [
            embedded_RNH.float().flatten(1),
            hidden_RNF.float().flatten(1),
            top.indices.flatten(1),
            (top.values - log_norm_RN[..., None]).flatten(1),
            log_norm_RN - logits_RNV.logsumexp(-1),
        ]

    def positions(self, line: Sequence[list[float]], num: int) -> list[_Kept]:
        embedded, hidden, ids, log_p, log_mass = line
        positions = len(log_mass)

        def part(numbers: list[float], dtype: torch.dtype) -> Tensor:
            size = len(numbers) // positions
            return torch.tensor(numbers[: num * size], dtype=dtype).view(num, size)

        parts = (
            part(embedded, torch.bfloat16),
            part(hidden, torch.bfloat16),
            part(ids, torch.int32),
            part(log_p, torch.float32),
            part(log_mass, torch.float32)[:, 0],
        )
        return [_Kept(*kept) for kept in zip(*parts, strict=True)]

    def sample(
        self, tokens: Sequence[int], positions: Sequence[int], kept: Sequence[_Kept]
    ) -> HeadSample | None:
        """The longest stretch without a gap, which a round without a draft leaves; None if it has
        no position to learn."""
        stretch = longest_run(positions)
        if len(stretch) < 2:
            return None
        parts = zip(*(kept[index] for index in stretch), strict=True)
        embedded_TH, hidden_TF, ids_TK, log_p_TK, log_mass_T = map(torch.stack, parts)
        return HeadSample(embedded_TH, hidden_TF, ids_TK, log_p_TK, log_mass_T, self._num_tokens)


def longest_run(positions: Sequence[int]) -> range:
    """The indices of the longest run of positions that follow each other."""
    gaps = [i for i, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    ends = [0, *gaps, len(positions)]
    return max((range(a, b) for a, b in pairwise(ends)), key=len)


class HeadStudent:
    """A head in training.

    Args:
        network: its weights, in float32.
    """

    def __init__(self, network: Eagle3Network) -> None:
        self.network = network
        self.module: nn.Module = network

    @property
    def architecture(self) -> str:
        return architecture(self.network.config)

    def compare(self, sample: HeadSample) -> Iterator[Comparison]:
        """Slot t of step i, which reads the token at t+1+i, is compared with the target there."""
        embedded_1TH = sample.embedded_TH[None].float()
        hidden_1TF = sample.hidden_TF[None].float()
        steps = min(STEPS, sample.num_positions)
        log_p_TC = with_tail(sample.log_p_TK, sample.num_tokens)
        outputs = training_time_test(self.network, embedded_1TH, hidden_1TF, steps)
        for i, output_1SH in enumerate(outputs):
            first = 1 + i
            logits_PD = self.network.logits(output_1SH[0, : len(log_p_TC) - first])
            yield Comparison(
                log_p_TC[first:],
                log_q_at(sample.ids_TK[first:], logits_PD),
                sample.log_mass_T[first:],
                DECAY**i,
            )


@dataclass(frozen=True)
class HeadBlueprint:
    """Builds a head to train.

    Attributes:
        config: its shape.
    """

    config: Eagle3Config

    def build(self) -> HeadStudent:
        own = replace(self.config, layer=copy.deepcopy(self.config.layer))  # the network writes it
        return HeadStudent(Eagle3Network(own).float())


class HeadSubject:
    """A copy of an engine's head, whose weights are exchanged, with those that the drafter runs.

    Args:
        engine: drafts with the copy once it is adopted.
        model: the head that the engine drafts with.
    """

    def __init__(self, engine: Engine, model: Eagle3Model) -> None:
        head = model.head
        network = copy.deepcopy(head.network)
        self._engine = engine
        self._head = Eagle3Head(network, head.vocabulary, head.name, head.embedding)
        self.name = head.name

    @property
    def architecture(self) -> str:
        return architecture(self._head.config)

    def blueprint(self) -> HeadBlueprint:
        return HeadBlueprint(self._head.config)

    def recorder(self, settings: Settings) -> HeadRecorder:
        return HeadRecorder(self._model, settings.top_k)

    def context(self, settings: Settings) -> int:
        return 0

    def weights(self) -> dict[str, Tensor]:
        return plain_weights(self._head.network, self.name)

    def stage(self, weights: Mapping[str, Tensor]) -> StagedWeights:
        networks = self._head.network, self._model.network
        return StagedWeights(
            tuple(pair for each in networks for pair in staged(each, weights, self.name).pairs)
        )

    def adopt(self) -> None:
        self._engine.adopt_draft(self._head)

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        with torch.inference_mode(False):
            network = self.blueprint().build().network
            network.load_state_dict(weights)
        head = Eagle3Head(network, self._head.vocabulary, self.name, self._head.embedding)
        save_eagle3(head, folder, self._head.network.fc.weight.dtype)

    @property
    def _model(self) -> Eagle3Model:
        """The head as the engine's drafter runs it."""
        model = model_of(self._engine)
        assert model is not None
        return model


def model_of(engine: Engine) -> Eagle3Model | None:
    """The EAGLE-3 head that an engine drafts with; None if it has none."""
    models = engine.drafter.capabilities.models
    return next((model for model in models if isinstance(model, Eagle3Model)), None)


def architecture(config: Eagle3Config) -> str:
    """What a head must share with another for their weights to be exchanged."""
    layers = ", ".join(map(str, config.target_layers))
    return (
        f"EAGLE-3 head of {config.layer.num_hidden_layers} layers, width "
        f"{config.layer.hidden_size}, draft vocabulary {config.draft_vocab_size}, on layers "
        f"{layers} of width {config.target_hidden_size}"
    )
