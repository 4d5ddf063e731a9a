"""Whether the passes over a batch had finite logits: summed on the device, read once per round.

Legend: B rows.
"""

from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import NonFiniteLogitsError


class Checked(Protocol):
    """A model whose passes are checked."""

    def non_finite(self, position: int) -> NonFiniteLogitsError:
        """The error for a row whose sum is not finite; ``position`` is where its round began."""


class Health:
    """The sums of the logits of a batch's passes since they were read last, by model.

    It belongs to one batch, so models and engines may serve several batches at once.
    """

    def __init__(self) -> None:
        self._sums: dict[Checked, list[Tensor]] = {}

    def add(self, model: Checked, sum_B: Tensor) -> None:
        """Notes a pass of a model: per row a number that is finite iff all its logits were."""
        self._sums.setdefault(model, []).append(sum_B)

    def drain(self) -> list[tuple[Checked, Tensor]]:
        """Each model that made a pass since the last call, and its sums over all of them (B,),
        finite iff every logit was."""
        sums, self._sums = self._sums, {}
        return [(model, _total(each)) for model, each in sums.items()]

    def check(self, position: int) -> None:
        """Reads the sums at once.

        Raises:
            NonFiniteLogitsError: some are not finite; it names ``position``.
        """
        for model, sum_B in self.drain():
            if not bool(sum_B.isfinite().all()):
                raise model.non_finite(position)


def _total(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
