"""Tokens on disk, and batches that are pure functions of (seed, step).

Since a batch depends only on its number, a resumed run sees exactly the batches that an
uninterrupted one would have seen, and no reader state is saved.

Shapes: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outrider.train.corpus import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def write_tokens(
    sources: Iterable[Source], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Any]:
    """Encode the corpus into `train.bin` and `val.bin` (uint16) and return its manifest.

    Every document is preceded by the end-of-text token.  The manifest, also written as
    `manifest.json`, lists name, version, licence, files, bytes and tokens of every source, and the
    bytes and tokens of each split (their ratio turns a loss per token into bits per byte).
    """
    if len(tokenizer) > 2**16:
        raise ValueError(f"vocabulary of {len(tokenizer)} does not fit 16-bit tokens (65536)")
    folder.mkdir(parents=True, exist_ok=True)
    totals = {split: {"files": 0, "bytes": 0, "tokens": 0} for split in ("train", "val")}
    rows = []
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for source in sources:
            num_tokens = 0
            encoded = tokenizer([d.text for d in source.documents], add_special_tokens=False)
            for document, ids in zip(source.documents, encoded["input_ids"], strict=True):
                tokens = np.array([tokenizer.eos_token_id, *ids], dtype=np.uint16)
                (val if document.held_out else train).write(tokens.tobytes())
                total = totals["val" if document.held_out else "train"]
                total["files"] += 1
                total["bytes"] += len(document.text.encode())
                total["tokens"] += len(tokens)
                num_tokens += len(tokens)
            rows.append(
                {
                    "name": source.name,
                    "version": source.version,
                    "licence": source.licence,
                    "files": len(source.documents),
                    "bytes": source.num_bytes,
                    "tokens": num_tokens,
                }
            )
    manifest = {"sources": rows, "splits": totals}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def open_tokens(path: Path) -> np.ndarray:
    """Map a file of uint16 tokens into memory; pages are read when they are used."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint16)
    return np.memmap(path, dtype=np.uint16, mode="r")


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of `size` items in an epoch, by a counter-based generator."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


@dataclass(frozen=True)
class Batches:
    """`batches(step)` is the [B, T+1] int64 batch of that step; the extra column is the last label.

    Each epoch visits every window of T tokens once, in an order shuffled by (seed, epoch).  The
    windows begin at a different offset in each epoch.
    """

    tokens: np.ndarray
    batch_size: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 * self.length + 1:
            raise ValueError(
                f"the corpus has {len(self.tokens)} tokens, too few for sequences of {self.length}"
            )

    def __call__(self, step: int) -> Tensor:
        num_windows = (len(self.tokens) - 1) // self.length - 1
        rows = []
        for index in range(step * self.batch_size, (step + 1) * self.batch_size):
            epoch, position = divmod(index, num_windows)
            offset = (epoch * 7919) % self.length
            window = int(permutation(self.seed, epoch, num_windows)[position])
            start = offset + window * self.length
            rows.append(self.tokens[start : start + self.length + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def validation_rows(tokens: np.ndarray, length: int, max_rows: int) -> Tensor:
    """[B, T+1] evenly spaced windows of held-out tokens."""
    num_windows = (len(tokens) - 1) // length
    if num_windows < 1:
        raise ValueError(f"{len(tokens)} held-out tokens are too few for sequences of {length}")
    chosen = np.linspace(0, num_windows - 1, min(max_rows, num_windows)).astype(int)
    rows = [tokens[i * length : i * length + length + 1].astype(np.int64) for i in chosen]
    return torch.from_numpy(np.stack(rows))
