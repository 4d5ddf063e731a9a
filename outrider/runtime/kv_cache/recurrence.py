"""How the state of a recurrent layer follows tokens: the interface, and a convolution's window.

Legend: B rows, N query tokens, C channels, W tokens of a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""The tensors (B, …) that one recurrence remembers. Never modified in place."""


class Recurrence(Protocol):
    """How the state of one kind of layer follows tokens.

    Attributes:
        fill: the number that each tensor of the state of an empty sequence is filled with.
    """

    @property
    def fill(self) -> tuple[float, ...]: ...

    def empty(self, inputs: Sequence[Tensor]) -> State:
        """The state of empty sequences, as many as the inputs have rows."""

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        """Reads tokens.

        Args:
            state: the state before them; not modified.
            inputs: what the layer computed of the N tokens.
            kept_B: the state returned is that after so many of them in each row; None for all.

        Returns:
            The recurrence's output at all N tokens, where those beyond ``kept_B`` are arbitrary,
            and the state.
        """


@dataclass(frozen=True)
class Window:
    """The inputs of a convolution at the last tokens.

    Attributes:
        width: how many tokens; as many as the convolution reads.
    """

    width: int
    fill: tuple[float, ...] = (0.0,)

    def empty(self, inputs: Sequence[Tensor]) -> State:
        (x_BCN,) = inputs
        return (x_BCN.new_zeros(*x_BCN.shape[:2], self.width),)

    def run(
        self, state: State, inputs: Sequence[Tensor], kept_B: Tensor | None
    ) -> tuple[Tensor, State]:
        """Returns the window before and the inputs side by side, (B, C, width + N)."""
        all_BCT = torch.cat([*state, *inputs], -1)
        if kept_B is None:
            return all_BCT, (all_BCT[..., -self.width :].clone(),)
        index_BW = kept_B[:, None] + torch.arange(self.width, device=kept_B.device)
        index_BCW = index_BW[:, None].expand(-1, all_BCT.shape[1], -1)
        return all_BCT, (all_BCT.gather(-1, index_BCW),)


def beyond(kept_B: Tensor, num: int) -> Tensor:
    """Which of ``num`` tokens come after the first ``kept_B`` of each row, (B, N)."""
    return torch.arange(num, device=kept_B.device) >= kept_B[:, None]
