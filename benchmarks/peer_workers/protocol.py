"""The protocol between the benchmark and a worker process: one JSON object per line.

    {"verb": "prepare", "row": "speculative", "job": {…}}
        → {"seconds": 1.2, "precision": "float32", …}
    {"verb": "generate", "row": "speculative", "prompt": […], "num_tokens": 64}
        → {"tokens": […], "seconds": 0.3, …}

    {"verb": "decode_all", "prompts": [[…], …], "clients": 4, "num_tokens": 64}
        → {"seconds": 2.5}
    {"verb": "likelihood", "texts": [[…], …]}
        → {"nats": 31.5, "num_tokens": 12}

A failed request is answered by ``{"error": "…"}``, and the process continues. This module imports
only Python's standard library, since it runs in every peer's environment.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

SEED = 1
"""Of sampled continuations."""

KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""Names of precisions in llama.cpp, in OpenVINO, and at the end of rows."""

BLOCKS = ("q8_0", "q4_0", "q4_1")
"""Formats of GGUF files that hold weights in blocks of 32, with one scale each."""

ROUNDED = "+a8"
"""Behind a format of blocks: Outrider's layers round their inputs to 8 bits, as llama.cpp's do."""

OURS_IN_BLOCKS = (*BLOCKS, *(kind + ROUNDED for kind in BLOCKS))
"""What Outrider's rows name."""

HEAD_KINDS = ("int8:32+a8", "int4+a8")
"""Kinds of a head's weights that Outrider's rows may name behind those of the target."""

INT8 = "int8"
"""Weights of 8 bits in OpenVINO's own format."""


@dataclass(frozen=True)
class Job:
    """A pair and its settings, the same for every peer.

    Attributes:
        target: folder of the target, float32 safetensors with its tokenizer.
        draft: folder of the draft.
        num_speculative_tokens: γ.
        threads: of all computations.
        max_length: most tokens of a prompt and its continuation.
        exports: a folder for converted models, kept between runs.
        dtype: precision of weights, arithmetic and KV cache, ``float32`` or ``bfloat16``, unless a
            row names another one, or a format of blocks, which is of the weights alone.
        temperature: of all continuations, without truncation; 0 is greedy.
        head: of the target, for methods that draft with one, which only Outrider reads.
    """

    target: str
    draft: str
    num_speculative_tokens: int
    threads: int
    max_length: int
    exports: str
    dtype: str = "float32"
    temperature: float = 0.0
    head: str | None = None


@dataclass(frozen=True)
class Ready:
    """The reply after a row has been loaded.

    Attributes:
        precision: of weights and arithmetic, and of the KV cache if it differs.
        threads: the number that is actually set.
        version: of the peer.
        seconds: for loading and compiling, without warm-up.
        export_seconds: for converting the pair; 0 if it was converted before.
        note: further information.
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
        drafted: number of drafted tokens; None if the peer does not report it.
        accepted: number of accepted tokens; None if the peer does not report it.
    """

    tokens: list[int]
    seconds: float
    drafted: int | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Batch:
    """Many continuations, of as many at a time as there are clients.

    Attributes:
        seconds: from the first request to the end of the last continuation.
        clients_seconds: of these, the processor time of clients that share the server's only
            processor; 0 where they have one of their own.
    """

    seconds: float
    clients_seconds: float = 0.0


@dataclass(frozen=True)
class Likelihood:
    """How probable texts are, each from its second token on.

    Attributes:
        nats: sum of the negative log-probabilities.
        num_tokens: number of these.
    """

    nats: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean."""
        return math.exp(self.nats / self.num_tokens)


class Peer(Protocol):
    """The interface of a worker."""

    def prepare(self, row: str, job: Job) -> Ready:
        """Exports, loads and compiles what the row needs."""

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        """Continues by exactly ``num_tokens`` tokens, past any end token."""

    def close(self) -> None:
        """Frees all resources of the worker."""


class Batching(Protocol):
    """The interface of a worker that continues many prompts."""

    def decode_all(self, prompts: list[list[int]], clients: int, num_tokens: int) -> Batch:
        """Continues every prompt by exactly ``num_tokens`` tokens; each of the clients asks for one
        continuation after the other."""

    def close(self) -> None:
        """Frees all resources of the worker."""


class Scoring(Protocol):
    """The interface of a worker that computes likelihoods."""

    def prepare(self, row: str, job: Job) -> Ready:
        """Exports, loads and compiles what the row needs."""

    def likelihood(self, texts: list[list[int]]) -> Likelihood:
        """The likelihood of all texts together, under the row that was prepared last."""

    def close(self) -> None:
        """Frees all resources of the worker."""


def serve(peer: Peer | Batching | Scoring) -> None:
    """Answers requests on standard output; output of libraries is redirected to standard error."""
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


def _answer(peer: Any, request: dict[str, Any]) -> Ready | Answer | Batch | Likelihood:
    answer: Ready | Answer | Batch | Likelihood
    if request["verb"] == "prepare":
        answer = peer.prepare(request["row"], Job(**request["job"]))
    elif request["verb"] == "decode_all":
        answer = peer.decode_all(request["prompts"], request["clients"], request["num_tokens"])
    elif request["verb"] == "likelihood":
        answer = peer.likelihood(request["texts"])
    else:
        answer = peer.generate(request["row"], request["prompt"], request["num_tokens"])
    return answer


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


class Watch:
    """The seconds of a block: ``with watch() as spent: …``, then ``spent.seconds``."""

    seconds = 0.0


@contextmanager
def watch() -> Iterator[Watch]:
    """Times the block."""
    spent, began = Watch(), time.perf_counter()
    yield spent
    spent.seconds = time.perf_counter() - began


def export_path(job: Job, model: str, kind: str) -> Path:
    """The path of a converted model, in the job's folder of exports."""
    return Path(job.exports) / f"{Path(model).parent.name}-{Path(model).name}-{kind}"
