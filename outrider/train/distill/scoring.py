"""The target's distributions of given samples, as cells, in memory or in shards on disk.

Shapes: N positions trained on, V vocabulary, C cells (``cells.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.train.disk import require_space
from outrider.train.distill.answers import Report
from outrider.train.distill.cells import Cells, top_cells
from outrider.train.distill.packing import assign, logits_of, pack, packs
from outrider.train.distill.sample import Sample
from outrider.train.distill.store import (
    REMEDY,
    Dataset,
    cell_bytes,
    shard_path,
    write_cells,
)


class Scorer:
    """Runs the target over samples and keeps its k most probable tokens at each position.

    Args:
        target: the model; evaluated without gradient.
        k: tokens to keep.
        temperature: of decoding, above zero.
        width: entries of the vocabulary that target and draft share.
        capacity: most tokens of a forward pass.
    """

    def __init__(
        self, target: PreTrainedModel, k: int, temperature: float, width: int, capacity: int
    ) -> None:
        self.target, self.k, self.temperature = target, min(k, width), temperature
        self.width = width
        self.capacity = capacity if packs(target) else 0
        self.num_cells = width if self.k == width else self.k + 1

    @torch.inference_mode()
    def cells(self, samples: Sequence[Sample]) -> list[Cells]:
        """The cells of each sample, on the CPU."""
        sizes = [sample.num_inputs for sample in samples]
        everything = range(len(samples))
        rows = (
            assign(sizes, everything, self.capacity)
            if self.capacity
            else [[index] for index in everything]
        )
        found: dict[int, Cells] = {}
        for members in rows:
            row = pack([samples[index] for index in members]).to(self.target.device)
            logits_NV = logits_of(self.target, row)[:, : self.width]
            cells = top_cells(logits_NV, self.k, self.temperature).to(torch.device("cpu"))
            counts = [samples[index].num_positions for index in members]
            parts = zip(cells.ids_Nk.split(counts), cells.log_p_NC.split(counts), strict=True)
            for index, (ids_Nk, log_p_NC) in zip(members, parts, strict=True):
                found[index] = Cells(ids_Nk.clone(), log_p_NC.clone())
        return [found[index] for index in everything]

    def scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with their cells."""
        pairs = zip(samples, self.cells(samples), strict=True)
        return [replace(sample, cells=cells) for sample, cells in pairs]

    def cached(
        self,
        samples: Sequence[Sample],
        folder: Path,
        report: Report = lambda what, done, total: None,
    ) -> Dataset:
        """The samples with their cells in shards, going on after those of an earlier run.

        Raises:
            DiskFullError: the disk has too little room for all shards that are missing.
        """
        dataset = Dataset(samples, folder)
        shards = list(dataset.shards())
        missing = [
            sum(sample.num_positions for sample in chunk)
            for number, chunk in shards
            if not shard_path(folder, number).exists()
        ]
        what = "the cache of the target's probabilities"
        require_space(folder, cell_bytes(sum(missing), self.num_cells), what, REMEDY)
        for number, chunk in shards:
            if not shard_path(folder, number).exists():
                write_cells(shard_path(folder, number), Cells.cat(self.cells(chunk)))
            report(what, number + 1, len(shards))
        return dataset
