"""What an adaptation adapts: a draft model (``draft_model.py``) or a head (``eagle3_head.py``).

A subject is seen from two sides. The engine's side records samples, exchanges weights and saves
them. The trainer's side is a :class:`Student`, which a :class:`Blueprint` builds and which may live
in another process: it compares the target's distributions in a sample with its own.

Legend: P positions, C cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from outrider.runtime.weights import StagedWeights
from outrider.train.online.collector import Recorder
from outrider.train.online.settings import Settings


@dataclass(frozen=True)
class Comparison:
    """Distributions of target and draft over the same cells at some positions.

    Attributes:
        log_p_PC: the target's log-probabilities, normalised over the cells.
        log_q_PC: the draft's.
        log_mass_P: log of the probability that the target has in the cells: 0 where they divide
            the whole vocabulary, less where a head drafts a part of it.
        weight: of these positions in the loss.
    """

    log_p_PC: Tensor
    log_q_PC: Tensor
    log_mass_P: Tensor
    weight: float = 1.0


class Student(Protocol):
    """The weights in training.

    Attributes:
        module: holds the weights, in float32.
        architecture: what the weights must share with others to be exchanged with them.
    """

    @property
    def module(self) -> nn.Module: ...
    @property
    def architecture(self) -> str: ...

    def compare(self, sample: Any) -> Iterator[Comparison]:
        """Target and draft at the positions of a sample, with a gradient for the weights."""


class Blueprint(Protocol):
    """Builds the trainer's side; can be pickled."""

    def build(self) -> Student:
        """The student, with arbitrary weights."""


class Subject(Protocol):
    """The engine's side.

    Attributes:
        name: how messages call it.
        architecture: as of :class:`Student`.
    """

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...

    def blueprint(self) -> Blueprint:
        """What the trainer builds its side from."""

    def recorder(self, settings: Settings) -> Recorder[Any]:
        """What is kept of each round."""

    def context(self, settings: Settings) -> int:
        """Tokens before the first position that a sample has, at most."""

    def weights(self) -> dict[str, Tensor]:
        """The weights that the engine drafts with, as ``plain_weights`` returns them."""

    def stage(self, weights: Mapping[str, Tensor]) -> StagedWeights:
        """Lays out new weights for the engine, which they do not affect until they are written."""

    def adopt(self) -> None:
        """Lets the engine draft with weights of its own."""

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes the weights as a folder to load them from."""
