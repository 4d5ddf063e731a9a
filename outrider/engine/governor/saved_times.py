"""Measured times of rounds in the cache folder, so that the next process need not measure them.

They depend on the machine, on what computes a forward pass (the models' structure and number
formats, compiled or not), and on the method; never on the values of weights. A hash of all that
names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from outrider.cache_folder import cache_folder
from outrider.runtime import HFModel
from outrider.runtime.hardware import hardware

_FORMAT = "8"


@dataclass(frozen=True)
class ReviewTime:
    """The seconds that a draft model takes in a review that leaves its state alone.

    Attributes:
        greedy: whether all rows were at temperature 0.
        rows: how many there were.
        seconds: in the draft model's forward pass, over ``REVIEW_WIDTH`` tokens of each row.
    """

    greedy: bool
    rows: int
    seconds: float


@dataclass(frozen=True)
class RoundTime:
    """The seconds of a round.

    Attributes:
        greedy: whether all rows were at temperature 0.
        rows: how many there were.
        length: tokens that each of them drafted.
        draft: seconds in the draft model's forward passes.
        total: seconds of the round.
    """

    greedy: bool
    rows: int
    length: int
    draft: float
    total: float


@dataclass
class SavedTimes:
    """The contents of a file.

    Attributes:
        sizes: numbers of rows that were measured.
        rounds: the times.
        reviews: those of reviews; none where the drafter has no draft model that can be reviewed.
    """

    sizes: list[int] = field(default_factory=list)
    rounds: list[RoundTime] = field(default_factory=list)
    reviews: list[ReviewTime] = field(default_factory=list)


def fingerprint(models: Sequence[HFModel], *others: object) -> str:
    """A hash of what times depend on.

    Args:
        models: the target, then the drafter's models.
        others: the method, its options and the like.
    """
    parts = [_FORMAT, torch.__version__, transformers.__version__, hardware()]
    parts += [torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    parts += [str(models[0].exact)]  # heads are never exact: their bits change no output
    for model in models:
        compiled = type(model.compiled).__name__, getattr(model.compiled, "failed", None)
        parts += [repr(model.module), str(model.device), str(compiled)]
        parts += [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in model.module.named_buffers()]
        parts += [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in _weights(model)]
    parts += map(repr, others)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def read_times(key: str) -> SavedTimes:
    """What was measured under a fingerprint; nothing if there is no file, or a damaged one."""
    try:
        values = json.loads(_path(key).read_text(encoding="utf-8"))
        rounds = [RoundTime(**each) for each in values["rounds"]]
        reviews = [ReviewTime(**each) for each in values["reviews"]]
        return SavedTimes([int(size) for size in values["sizes"]], rounds, reviews)
    except (OSError, ValueError, KeyError, TypeError):
        return SavedTimes()


def write_times(key: str, times: SavedTimes) -> None:
    """Keeps what was measured. Where the folder cannot be written, the next process measures
    again."""
    path = _path(key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(times)), encoding="utf-8")
        temporary.replace(path)


def _path(key: str) -> Path:
    return cache_folder() / "round_times" / f"{key}.json"


def _weights(model: HFModel) -> list[tuple[str, torch.Tensor]]:
    return sorted(model.module.named_parameters())
