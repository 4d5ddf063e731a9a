"""Shards on disk: samples, and the target's distributions of them.

Each shard is a safetensors file, written next to its path and renamed when it is complete, so an
interruption leaves whole shards only, and the next run goes on after them.  A folder is named by a
hash of everything that its contents depend on.

Shapes: S samples of a shard, T their tokens together, N their positions trained on, k tokens and C
cells (``cells.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.train.disk import tensor_bytes, writing
from outrider.train.distill.cells import Cells
from outrider.train.distill.sample import Sample

SHARD_SAMPLES = 64
"""Samples of a shard, and so what an interruption can cost."""
REMEDY = "free some, give --cache another disk, or lower --top-k"


def folder_for(root: Path, **contents: object) -> Path:
    """The folder of shards that depend on these values, whose JSON is written into it."""
    text = json.dumps(contents, sort_keys=True, indent=1, default=str)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "contents.json").write_text(text + "\n")
    return folder


def write_shard(path: Path, tensors: Mapping[str, Tensor], what: str) -> None:
    """Writes a shard atomically.

    Raises:
        DiskFullError: no room; nothing is left behind.
    """
    partial = path.with_suffix(".partial")
    with writing(partial, tensor_bytes(dict(tensors)), what, REMEDY):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, path)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Writes samples without their cells; an empty shard holds none."""
    tensors = {
        "tokens": torch.tensor([token for each in samples for token in each.tokens]).int(),
        "lengths": torch.tensor([len(each.tokens) for each in samples]).int(),
        "firsts": torch.tensor([each.first for each in samples]).int(),
    }
    write_shard(path, tensors, "answers")


def read_samples(path: Path) -> list[Sample]:
    return samples_of(load_file(path))


def samples_of(tensors: Mapping[str, Tensor]) -> list[Sample]:
    """The samples of a shard's tensors."""
    rows = tensors["tokens"].split(tensors["lengths"].tolist())
    firsts = tensors["firsts"].tolist()
    return [Sample(tuple(row.tolist()), first) for row, first in zip(rows, firsts, strict=True)]


def write_cells(path: Path, cells: Cells) -> None:
    tensors = {"ids": cells.ids_Nk, "log_p": cells.log_p_NC}
    write_shard(path, tensors, "the cache of the target's probabilities")


def cell_bytes(num_positions: int, num_cells: int) -> int:
    """Bytes on disk of so many positions: an int32 and a float32 per cell."""
    return 8 * num_cells * num_positions


class Dataset(Sequence[Sample]):
    """Samples in memory, with their cells on disk.

    Args:
        samples: all samples.
        folder: the shards of their cells, ``SHARD_SAMPLES`` samples each; None if the target
            computes its distributions during training.
    """

    def __init__(self, samples: Sequence[Sample], folder: Path | None) -> None:
        self.samples, self.folder = samples, folder
        self.sizes = [sample.num_inputs for sample in samples]
        self._begins = [0, *accumulate(sample.num_positions for sample in samples)]
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def num_positions(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        sample = self.samples[index]
        if self.folder is None:
            return sample
        number = index // SHARD_SAMPLES
        if number not in self._open:
            self._open[number] = safe_open(shard_path(self.folder, number), "pt")
        shard = self._open[number]
        base = self._begins[number * SHARD_SAMPLES]
        begin, end = self._begins[index] - base, self._begins[index + 1] - base
        ids_Nk = shard.get_slice("ids")[begin:end]
        log_p_NC = shard.get_slice("log_p")[begin:end]
        return Sample(sample.tokens, sample.first, Cells(ids_Nk, log_p_NC))

    def shards(self) -> Iterator[tuple[int, Sequence[Sample]]]:
        """Number and samples of each shard."""
        for begin in range(0, len(self.samples), SHARD_SAMPLES):
            yield begin // SHARD_SAMPLES, self.samples[begin : begin + SHARD_SAMPLES]
