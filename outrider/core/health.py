"""Detects NaN and infinite logits: summed on the device, read by the host once per round.

Legend: B rows.
"""

from typing import Protocol

import torch
from torch import Tensor

from outrider.core.errors import NonFiniteLogitsError


class Checked(Protocol):
    """A model whose forward passes are checked."""

    def non_finite(self, position: int) -> NonFiniteLogitsError:
        """The error for a row whose sum is not finite, in the round that began at ``position``."""


class Health:
    """Sums of the logits that each model has computed for a batch since they were last read.

    A ``Health`` belongs to one batch, so models and engines can serve several batches at once.
    """

    def __init__(self) -> None:
        self._sums: dict[Checked, list[Tensor]] = {}

    def add(self, model: Checked, sum_B: Tensor) -> None:
        """Records a forward pass: per row, a number that is finite iff all of its logits were."""
        self._sums.setdefault(model, []).append(sum_B)

    def drain(self) -> list[tuple[Checked, Tensor]]:
        """Each model that ran since the last call, and per row a number, shape (B,), that is finite
        iff all logits of all its forward passes were."""
        sums, self._sums = self._sums, {}
        return [(model, _total(each)) for model, each in sums.items()]

    def check(self, position: int) -> None:
        """Reads all sums now, which synchronises with the device.

        Raises:
            NonFiniteLogitsError: some are not finite; the error names ``position``.
        """
        for model, sum_B in self.drain():
            if not bool(sum_B.isfinite().all()):
                raise model.non_finite(position)


def _total(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
