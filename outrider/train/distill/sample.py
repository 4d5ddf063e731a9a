"""A sequence to train on: a prompt and its answer.

Shapes: N positions trained on: those that predict a token of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.train.distill.cells import Cells


@dataclass(frozen=True)
class Sample:
    """A prompt and its answer.

    Attributes:
        tokens: prompt and answer.
        first: index of the answer's first token, at least 1. The loss is on the answer only.
        cells: the target's distributions of the answer's tokens, N = len(tokens) - first of them;
            None where the target computes them during training.
    """

    tokens: tuple[int, ...]
    first: int
    cells: Cells | None = None

    @property
    def num_positions(self) -> int:
        """Positions trained on."""
        return len(self.tokens) - self.first

    @property
    def num_inputs(self) -> int:
        """Tokens that a model reads: the last one is only predicted."""
        return len(self.tokens) - 1


def cut(tokens: tuple[int, ...], first: int, length: int) -> Sample | None:
    """The sample's first tokens, so that a model reads at most `length`; None if nothing of the
    answer is left."""
    tokens = tokens[: length + 1]
    return Sample(tokens, first) if 1 <= first < len(tokens) else None
