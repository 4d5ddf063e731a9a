"""Sequence packing: several samples in one row, each attending to itself alone.

Position ids start at 0 in each sample, which transformers reads as a block-diagonal causal mask if
it is given no attention mask (``masking_utils.find_packed_sequence_indices``), for full and sliding
attention and every attention implementation.  :func:`packs` checks on the model itself that the
logits are those of separate sequences; a model for which they are not gets one sample per row.

The assignment of samples to rows is a pure function of (seed, epoch), so a resumed run sees the
rows of an uninterrupted one.

Shapes: T tokens of a row, N positions trained on, k tokens and C cells (``cells.py``), V
vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.train.data import permutation
from outrider.train.distill.cells import Cells
from outrider.train.distill.sample import Sample

_OPEN_ROWS = 32  # rows that may still be filled: more fill better, and mix the order less


@dataclass(frozen=True)
class Row:
    """Samples side by side, as a model reads them.

    Attributes:
        tokens_T: int64, all samples' tokens but the last of each.
        positions_T: int64, positions within each sample.
        predicts_N: int64, indices into T of the positions trained on.
        labels_N: int64, the tokens that follow them.
        cells: the target's distributions there; None where the target computes them.
        batch_positions: positions trained on in the whole batch: the loss is their mean.
    """

    tokens_T: Tensor
    positions_T: Tensor
    predicts_N: Tensor
    labels_N: Tensor
    cells: Cells | None
    batch_positions: int

    def to(self, device: torch.device) -> Row:
        return replace(
            self,
            tokens_T=self.tokens_T.to(device),
            positions_T=self.positions_T.to(device),
            predicts_N=self.predicts_N.to(device),
            labels_N=self.labels_N.to(device),
            cells=None if self.cells is None else self.cells.to(device),
        )


def pack(samples: Sequence[Sample]) -> Row:
    """The row of these samples, as a batch of its own."""
    tokens: list[int] = []
    positions: list[int] = []
    predicts: list[int] = []
    labels: list[int] = []
    for sample in samples:
        begin = len(tokens)
        predicts.extend(range(begin + sample.first - 1, begin + sample.num_inputs))
        labels.extend(sample.tokens[sample.first :])
        tokens.extend(sample.tokens[:-1])
        positions.extend(range(sample.num_inputs))
    cells = [sample.cells for sample in samples if sample.cells is not None]
    return Row(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(predicts),
        torch.tensor(labels),
        Cells.cat(cells) if cells else None,
        len(predicts),
    )


def batch_of(rows: Iterable[Sequence[Sample]]) -> list[Row]:
    """The rows of one step; the mean of the loss is over the positions of all of them."""
    packed = [pack(samples) for samples in rows]
    total = sum(len(row.predicts_N) for row in packed)
    return [replace(row, batch_positions=total) for row in packed]


def assign(sizes: Sequence[int], order: Iterable[int], capacity: int) -> list[list[int]]:
    """Samples to rows by first fit: each sample, in this order, goes into the first open row with
    room.

    Args:
        sizes: tokens that a model reads of each sample; none is more than the capacity.
        order: the samples' indices.
        capacity: most tokens of a row.
    """
    done: list[list[int]] = []
    open_rows: list[tuple[list[int], int]] = []
    for index in order:
        size = sizes[index]
        for number, (members, room) in enumerate(open_rows):
            if size <= room:
                members.append(index)
                open_rows[number] = (members, room - size)
                break
        else:
            open_rows.append(([index], capacity - size))
            if len(open_rows) > _OPEN_ROWS:
                done.append(open_rows.pop(0)[0])
    return [*done, *(members for members, _ in open_rows)]


class Packing:
    """Rows without end: epoch after epoch, each sample once an epoch, in shuffled rows.

    Args:
        sizes: tokens that a model reads of each sample.
        capacity: most tokens of a row; 0 puts one sample into each row.
        seed: of the order.
    """

    def __init__(self, sizes: Sequence[int], capacity: int, seed: int) -> None:
        self.sizes, self.capacity, self.seed = sizes, capacity, seed
        self._begins = [0]  # number of the first row of each epoch
        self._plan = lru_cache(maxsize=2)(self._epoch)

    def __getitem__(self, number: int) -> list[int]:
        """The indices of the samples of a row."""
        while self._begins[-1] <= number:
            self._begins.append(self._begins[-1] + len(self._plan(len(self._begins) - 1)))
        epoch = bisect_right(self._begins, number) - 1
        return self._plan(epoch)[number - self._begins[epoch]]

    def _epoch(self, epoch: int) -> list[list[int]]:
        order = permutation(self.seed, epoch, len(self.sizes)).tolist()
        if not self.capacity:
            return [[index] for index in order]
        rows = assign(self.sizes, order, self.capacity)
        shuffled = permutation(self.seed + 1, epoch, len(rows)).tolist()
        return [rows[index] for index in shuffled]


def logits_of(model: PreTrainedModel, row: Row) -> Tensor:
    """The model's logits [N, V] at the positions of a row that are trained on."""
    output = model(
        input_ids=row.tokens_T[None],
        position_ids=row.positions_T[None],
        use_cache=False,
        logits_to_keep=row.predicts_N,
    )
    logits_NV: Tensor = output.logits[0]
    return logits_NV


@torch.no_grad()
def packs(model: PreTrainedModel) -> bool:
    """Whether the model's logits of two packed samples are those of the samples alone."""
    vocab = model.config.get_text_config().vocab_size
    first = tuple(token % vocab for token in range(1, 12))
    second = tuple(token % vocab for token in range(40, 49))
    samples = [Sample(first, 1), Sample(second, 1)]
    device = model.device
    alone_NV = torch.cat([logits_of(model, pack([each]).to(device)).float() for each in samples])
    packed_NV = logits_of(model, pack(samples).to(device)).float()
    scale = alone_NV.abs().max().clamp(min=1.0)
    off = (packed_NV - alone_NV).abs().max() / scale
    return bool(off <= 64 * torch.finfo(model.dtype).eps)
