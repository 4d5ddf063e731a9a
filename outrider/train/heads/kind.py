"""What a kind of head tells the trainer: how it is built, what it minimises, how it is saved.

A new kind is one file with a :class:`HeadKind`, and a row in ``kinds.py``.

Legend: V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from outrider.drafters.heads.head import Head
from outrider.options import Option, options_of, resolve
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.states import States


class Training(Protocol):
    """A head in training.

    Attributes:
        module: the weights that are trained, in float32.
    """

    @property
    def module(self) -> nn.Module: ...

    def loss(self, batch: StateBatch) -> Tensor:
        """What is minimised."""

    def head(self) -> Head:
        """The head with its present weights, which the caller does not change."""

    def save(self, folder: Path) -> None:
        """Writes the head in a format that :func:`outrider.load` reads."""


@dataclass(frozen=True)
class Ground:
    """What a head is built on.

    Attributes:
        target: the frozen target.
        counts_V: how often the target wrote each token in the data.
        seed: of the initial weights.
        target_name: what the checkpoint calls the target; None takes where it was loaded from.
    """

    target: HFModel
    counts_V: Tensor
    seed: int
    target_name: str | None = None

    @property
    def name_of_target(self) -> str | None:
        """The name, folder or hub id of the target for the checkpoint."""
        return self.target_name or getattr(self.target.module, "name_or_path", None) or None


@dataclass(frozen=True)
class HeadKind:
    """A kind of head that can be trained.

    Attributes:
        name: the name that users type.
        summary: one line for users.
        method: the method that runs it, which measures its acceptance.
        layers: the target's layers that its hidden states are computed of; takes the target and the
            options' values.
        build: makes the head to train from the :class:`Ground`; its keyword-only parameters are
            options.
        finish: what is done with the best head's folder when training is over, given hidden states
            of samples that were kept apart; may be done again. None for nothing.
    """

    name: str
    summary: str
    method: str
    layers: Callable[[HFModel, Mapping[str, Any]], tuple[int, ...]]
    build: Callable[..., Training]
    finish: Callable[[Path, Ground, States], None] | None = None

    @property
    def options(self) -> dict[str, Option]:
        """The options by name."""
        return options_of(self.build)

    def values(self, options: Mapping[str, object]) -> dict[str, Any]:
        """The options' values, defaults filled in.

        Raises:
            InvalidParameterError: an unknown option, or a value of another type.
        """
        given = resolve(f"a head of kind {self.name!r}", self.options, options)
        return {name: given.get(name, option.default) for name, option in self.options.items()}
