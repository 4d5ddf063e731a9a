"""Detects NaN and infinite logits: summed on the device, read by the host once per round.

A model may mask tokens by -inf or the least finite number, as Chameleon masks image tokens. NaN,
+inf and positions at which every token is masked are damage.

Legend: B rows, N query tokens, V vocabulary.
"""

import math
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

    def drain(self, first: Checked | None = None) -> list[tuple[Checked, Tensor]]:
        """Each model that ran since the last call, and per row a number, shape (B,), that is finite
        iff all logits of all its forward passes were.

        Args:
            first: the model that is returned first, if it ran: the one that a caller blames where
                the logits of several models are not finite.
        """
        sums, self._sums = self._sums, {}
        models = list(sums)
        if first in sums:
            models.remove(first)
            models.insert(0, first)
        return [(model, _total(sums[model])) for model in models]

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


def health_of(logits_BNV: Tensor) -> Tensor:
    """The sum of each query token's largest logit, (B,): finite iff all logits of a row are
    healthy."""
    return logits_BNV.amax(-1).sum(1, dtype=torch.float32)


def deviation(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The largest difference between two tensors of logits, infinite if they mask different tokens,
    and the largest absolute value of the wanted ones. Masked logits do not count."""
    masked = torch.finfo(wanted.dtype).min / 2
    hidden = wanted < masked
    if not torch.equal(hidden, found < masked):
        return math.inf, 0.0
    off = (found - wanted).masked_fill(hidden, 0)
    return float(off.abs().max()), float(wanted.masked_fill(hidden, 0).abs().max())
