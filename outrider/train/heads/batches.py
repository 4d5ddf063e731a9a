"""Batches of cached hidden states, as a pure function of the step.

Each epoch visits every sample once. The samples of an epoch are shuffled by (seed, epoch), then
sorted by length within groups, so that rows of a batch have similar lengths and little is padding;
the batches are shuffled again.

Legend: B rows, T tokens (the longest row of the batch), H width of the target, F width of the
layers that the head reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.train.heads.states import States, StateSample

_GROUP = 16  # batches whose samples are sorted together


@dataclass(frozen=True)
class StateBatch:
    """Rows of hidden states, padded with zeros at their ends.

    Attributes:
        tokens_BT: int64.
        answers_BT: bool: which tokens the target wrote; False in the padding.
        hidden_BTF: the chosen layers side by side, float32.
        final_BTH: the output of the target's final norm, float32.
        log_norm_BT: log Σ exp of the target's logits.
        num_tokens: tokens without the padding.
    """

    tokens_BT: Tensor
    answers_BT: Tensor
    hidden_BTF: Tensor
    final_BTH: Tensor
    log_norm_BT: Tensor
    num_tokens: int

    @classmethod
    def of(cls, samples: list[StateSample], device: torch.device | str = "cpu") -> StateBatch:
        """The batch of some samples."""

        def padded(name: str) -> Tensor:
            rows = [getattr(sample, name) for sample in samples]
            tensor = pad_sequence(rows, batch_first=True)
            return (tensor.float() if tensor.is_floating_point() else tensor).to(device)

        return cls(
            padded("tokens_T"),
            padded("answers_T"),
            padded("hidden_TF"),
            padded("final_TH"),
            padded("log_norm_T"),
            sum(len(sample.tokens_T) for sample in samples),
        )


@dataclass(frozen=True)
class StateBatches:
    """``batches(step)`` is the batch of that step.

    Attributes:
        states: the samples.
        batch_size: rows of a batch; the last batch of an epoch may have fewer.
        seed: of the order.
        device: where batches go.
    """

    states: States
    batch_size: int
    seed: int
    device: torch.device | str = "cpu"

    def __call__(self, step: int) -> StateBatch:
        epoch, number = divmod(step, self.per_epoch)
        rows = _epoch(tuple(self.states.sample_lengths), self.batch_size, self.seed, epoch)[number]
        return StateBatch.of([self.states[row] for row in rows], self.device)

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch."""
        return -(-len(self.states) // self.batch_size)


@lru_cache(maxsize=2)
def _epoch(lengths: tuple[int, ...], size: int, seed: int, epoch: int) -> list[list[int]]:
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    order = generator.permutation(len(lengths)).tolist()
    batches = []
    for first in range(0, len(order), size * _GROUP):
        group = sorted(order[first : first + size * _GROUP], key=lengths.__getitem__)
        batches += [group[i : i + size] for i in range(0, len(group), size)]
    return [batches[i] for i in generator.permutation(len(batches)).tolist()]
