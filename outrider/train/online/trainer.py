"""The draft that learns: update steps, its acceptance on samples, checkpoints.

Legend: P positions, C cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider.core.errors import OutriderError
from outrider.train.checkpoint import load_checkpoint, save_checkpoint
from outrider.train.losses import DIVERGENCES
from outrider.train.online.files import saving_error
from outrider.train.online.samples import AnySample
from outrider.train.online.subject import Student
from outrider.train.optim import build_adamw

CLIP = 1.0
"""Maximum norm of the gradient."""


class DivergedError(OutriderError, ArithmeticError):
    """A loss or a gradient is not finite. The weights are those before the step."""


class Trainer:
    """Trains a draft model or a head in float32 on the target's distributions.

    Args:
        student: its weights, in float32; changed in place.
        divergence: a name of ``outrider.train.losses.DIVERGENCES``.
        learning_rate: of AdamW, constant.

    Attributes:
        module: the weights; in evaluation mode, so without dropout.
        step: steps taken so far.
    """

    def __init__(self, student: Student, divergence: str, learning_rate: float) -> None:
        self.module = student.module.eval().requires_grad_(True)
        self._student = student
        self.step = 0
        self._divergence = DIVERGENCES[divergence]
        self._learning_rate = learning_rate
        self._optimizers = build_adamw(self.module, learning_rate)
        self._identity = {"draft": student.architecture, "divergence": divergence}

    def update(self, samples: Sequence[AnySample]) -> float:
        """One step on the mean divergence over the samples' positions, which it returns, in nats.

        Samples pass one by one, so that a batch needs no more memory than its longest sample.

        Raises:
            DivergedError: the loss or its gradient is not finite; no weight has changed.
        """
        total = sum(sample.num_positions for sample in samples)
        loss = 0.0
        for sample in samples:
            part = self._loss(sample) / total
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        if not torch.isfinite(norm) or loss != loss:
            self._zero_grad()
            raise DivergedError(
                f"the loss of the draft is not finite at step {self.step + 1} (learning rate "
                f"{self._learning_rate}): adaptation stops and the last good weights stay; adapt "
                f"with a lower learning_rate"
            )
        for optimizer in self._optimizers:
            optimizer.step()
        self._zero_grad()
        self.step += 1
        return loss

    @torch.no_grad()
    def alpha(self, samples: Sequence[AnySample]) -> float:
        """The mean of Σ min(p, q) over the samples' positions, at temperature 1 and over the cells:
        at most the draft's α there, for the comparison of weights."""
        shared = [
            torch.minimum(each.log_p_PC + each.log_mass_P[:, None], each.log_q_PC).exp().sum(1)
            for sample in samples
            for each in self._student.compare(sample)
        ]
        return float(torch.cat(shared).mean())

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights, under the names of ``state_dict``."""
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Goes on from other weights, with an optimiser that has forgotten its steps."""
        self.module.load_state_dict(weights)
        self._optimizers = build_adamw(self.module, self._learning_rate)

    def save(self, folder: Path) -> None:
        """Saves all that a resumed trainer needs, atomically. No token is saved.

        Raises:
            SavingError: the disk is full, say; the last checkpoint is intact.
        """
        try:
            save_checkpoint(folder, self.step, self.module, self._optimizers, self._identity)
        except OSError as error:
            size = 3 * sum(parameter.nbytes for parameter in self.module.parameters())
            raise saving_error(folder, size, error) from error

    def resume(self, folder: Path) -> None:
        """Restores the checkpoint of a folder, if there is one.

        Raises:
            ValueError: it is that of another draft model, or of another divergence.
        """
        self.step = load_checkpoint(folder, self.module, self._optimizers, self._identity)

    def _loss(self, sample: AnySample) -> Tensor:
        """The sum of the divergence over a sample's positions, weighted by the target's probability
        of what the draft can draft."""
        losses = [
            each.weight
            * (each.log_mass_P.exp() * self._divergence(each.log_p_PC, each.log_q_PC)).sum()
            for each in self._student.compare(sample)
        ]
        return torch.stack(losses).sum()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
