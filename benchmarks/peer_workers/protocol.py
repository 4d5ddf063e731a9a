"""What a peer's process and the benchmark say to each other: one JSON object a line.

    {"verb": "prepare", "row": "speculative", "job": {…}}
        → {"seconds": 1.2, "precision": "float32", …}
    {"verb": "generate", "row": "speculative", "prompt": […], "num_tokens": 64}
        → {"tokens": […], "seconds": 0.3, …}

A failure answers ``{"error": "…"}`` and leaves the process alive. Python's standard library alone,
for this runs in every peer's environment.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""What llama.cpp and OpenVINO call a precision, and rows that name one."""


@dataclass(frozen=True)
class Job:
    """One pair and how it is to be run, the same for every peer.

    Attributes:
        target: folder of the target, float32 safetensors with its tokenizer.
        draft: folder of the draft.
        num_speculative_tokens: γ, of every round.
        threads: of every computation.
        max_length: most tokens of a prompt and its continuation.
        exports: a folder that outlives the run, for what a peer makes of the pair.
        dtype: precision of weights, arithmetic and cache, ``float32`` or ``bfloat16``; rows that
            name another one say so.
    """

    target: str
    draft: str
    num_speculative_tokens: int
    threads: int
    max_length: int
    exports: str
    dtype: str = "float32"


@dataclass(frozen=True)
class Ready:
    """A row that can generate.

    Attributes:
        precision: of weights and arithmetic, and of the cache where it differs.
        threads: really set.
        version: of the peer.
        seconds: loading and compiling, warm-up of shapes left out.
        export_seconds: conversion of the pair; 0 if it was there.
        note: whatever else a reader should know.
    """

    precision: str
    threads: int
    version: str
    seconds: float
    export_seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """One continuation.

    Attributes:
        tokens: the new ids.
        seconds: of the whole call, prefill included.
        drafted: tokens that were proposed; None where the peer does not say.
        accepted: tokens of those that were kept.
        passes: passes of the target after the prompt's; None where the peer does not say.
    """

    tokens: list[int]
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    passes: int | None = None


class Peer(Protocol):
    """What a worker serves."""

    def prepare(self, row: str, job: Job) -> Ready:
        """Exports, loads and compiles what the row needs."""

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        """Continues greedily by exactly so many tokens, whatever they are."""

    def close(self) -> None:
        """Ends what the worker started."""


def serve(peer: Peer) -> None:
    """Answers on what was standard output; whatever a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = asdict(_answer(peer, json.loads(line)))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {_first_line(error)}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
    peer.close()


def _answer(peer: Peer, request: dict[str, Any]) -> Ready | Answer:
    if request["verb"] == "prepare":
        return peer.prepare(request["row"], Job(**request["job"]))
    return peer.generate(request["row"], request["prompt"], request["num_tokens"])


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


class Watch:
    """Seconds of a block: ``with watch() as spent: …``, then ``spent.seconds``."""

    seconds = 0.0


@contextmanager
def watch() -> Iterator[Watch]:
    """Times the block."""
    spent, began = Watch(), time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - began


def export_path(job: Job, model: str, kind: str) -> Path:
    """Where the export of a model of the job stands: beside others of the same pair."""
    return Path(job.exports) / f"{Path(model).parent.name}-{Path(model).name}-{kind}"
