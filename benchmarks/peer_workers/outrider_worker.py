"""Outrider as a peer; a row is the name of a method, optionally followed by a format of blocks,
such as `` q8_0``, or `` q8_0+a8`` with inputs rounded to 8 bits, too, by a kind of the head's
weights, such as `` int4+a8``, and by `` compiled``.

With blocks, the target is the GGUF file that llama.cpp reads, whose blocks are kept; the draft has
the job's precision, and so has the head if the row names no kind. ``auto`` is what
``outrider.load`` does with the head where nothing is set: its drafts have no fixed length, and its
samples no seed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import outrider
from benchmarks.peer_workers.protocol import (
    HEAD_KINDS,
    OURS_IN_BLOCKS,
    ROUNDED,
    SEED,
    Answer,
    Job,
    Ready,
    serve,
    watch,
)
from outrider import Engine, Sampling
from outrider.runtime import HFModel, load_model
from outrider.runtime.executors.prepare import prepare


class Outrider:
    """A worker with one engine per row, over one copy of each model for all rows that run alike."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, bool, bool], HFModel] = {}
        self.engines: dict[str, Engine] = {}
        self.sampling = Sampling(temperature=0.0)

    def prepare(self, row: str, job: Job) -> Ready:
        torch.set_num_threads(job.threads)
        method, *how = row.split()
        compiled = "compiled" in how
        with watch() as exporting:
            source = target_source(job, how)
        with watch() as spent:
            target = self._model(source, job, compiled, rounds_inputs(how))
            draft: HFModel | str | None = job.head
            if method == "speculative":
                draft = self._model(job.draft, job, compiled)
            elif method in ("plain", "prompt-lookup"):
                draft = None
            self.engines[row] = outrider.load(
                target, draft, method, quantize_draft=of_head(how), **lengths(method, job)
            )
            self.sampling = Sampling(temperature=job.temperature, ignore_eos=True)
        return Ready(
            precision=precision(how) or str(target.dtype).removeprefix("torch."),
            export_seconds=exporting.seconds,
            threads=torch.get_num_threads(),
            version=f"outrider {outrider.__version__}, torch {torch.__version__}",
            seconds=spent.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        seed = None if row.startswith("auto") else SEED
        sampling = replace(self.sampling, max_new_tokens=num_tokens, seed=seed)
        with watch() as spent:
            (result,) = self.engines[row].generate([prompt], sampling)
        stats = result.stats
        return Answer(list(result.token_ids), spent.seconds, stats.drafted, stats.accepted)

    def close(self) -> None:
        self.engines.clear()

    def _model(self, source: str, job: Job, compiled: bool, rounded: bool = False) -> HFModel:
        key = source, compiled, rounded
        if key not in self.models:
            keep = "keep" + rounded * ROUNDED if source.endswith(".gguf") else None
            model = load_model(source, dtype=job.dtype, device="cpu", quantized=keep)
            prepare(model, "auto" if compiled else "off", own=True)
            self.models[key] = model
        return self.models[key]


def lengths(method: str, job: Job) -> dict[str, Any]:
    """The arguments of ``outrider.load`` that say how much is drafted. γ is of draft models and of
    chains of heads; trees have the shape that is theirs, and copies their own length."""
    if method == "auto":
        return {}
    if method == "eagle3-hybrid":
        options = {"head_tokens": job.num_speculative_tokens}
        return {"num_speculative_tokens": "fixed", "options": options}
    if method == "eagle3-tree-hybrid":
        return {"num_speculative_tokens": "fixed"}
    return {"num_speculative_tokens": job.num_speculative_tokens}


def precision(how: Sequence[str]) -> str | None:
    """The word of a row after its method that names blocks, and maybe rounded inputs, if any."""
    return next((word for word in how if word in OURS_IN_BLOCKS), None)


def of_head(how: Sequence[str]) -> str | None:
    """The kind of a head's weights that a row names, if any."""
    return next((word for word in how if word in HEAD_KINDS), None)


def blocks(how: Sequence[str]) -> str | None:
    """The format of blocks that a row names, if there is one."""
    found = precision(how)
    return found and found.removesuffix(ROUNDED)


def rounds_inputs(how: Sequence[str]) -> bool:
    """Whether a row's layers round their inputs to 8 bits."""
    return (precision(how) or "").endswith(ROUNDED)


def target_source(job: Job, how: Sequence[str]) -> str:
    """The folder of the target, or with blocks its GGUF file."""
    kind = blocks(how)
    if kind is None:
        return job.target
    from benchmarks.peer_workers.gguf_export import exported  # needs the package gguf

    return str(exported(job, job.target, kind))


if __name__ == "__main__":
    serve(Outrider())
