"""A worker's models, and its answers to a block."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.cluster.batch.blocks import Block
from outrider.cluster.batch.lines import Asking, LineError, Record, malformed, read_line
from outrider.core.errors import OutriderError
from outrider.engine import Engine, Request, Result, load
from outrider.lab.model_files import fingerprint


@dataclass(frozen=True)
class Answers:
    """The answers to a block.

    Attributes:
        text: the lines of output, each with its end.
        errors: the numbers of the lines that have none, and why.
        num_tokens: tokens of all outputs.
    """

    text: str
    errors: tuple[tuple[int, str], ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True)
class LoadedModels:
    """Loads the models of a worker. A process calls it once, with the worker's number.

    Attributes:
        loading: the arguments of :func:`outrider.load`.
        asking: how lines are answered.
        num_workers: workers of a machine, which share its processors and its GPUs; 0 where the
            workers' devices and threads are another's business, such as Ray's.
    """

    loading: Mapping[str, Any]
    asking: Asking
    num_workers: int = 0

    @property
    def contents(self) -> dict[str, Any]:
        """What answers depend on, by names of options. The device is not among it; the models'
        weights are, which may be trained on between two runs."""
        from outrider import __version__

        models = {name: value for name, value in self.loading.items() if name != "device"}
        how = {name: value for name, value in vars(self.asking).items() if name != "sampling"}
        weights = {
            f"weights of the {role} '{name}'": fingerprint(str(name), role)
            for role in ("target", "draft")
            if isinstance(name := self.loading.get(role), str | Path)
        }
        return {"version": __version__} | models | weights | how | vars(self.asking.sampling)

    def __call__(self, number: int) -> BlockAnswerer:
        loading = dict(self.loading)
        if self.num_workers:
            torch.set_num_threads(max(1, _num_processors() // self.num_workers))
            if loading.get("device") in ("auto", "cuda") and torch.cuda.is_available():
                loading["device"] = f"cuda:{number % torch.cuda.device_count()}"
        engine = load(**loading)
        name = self.asking.model_name or engine.target.name
        return BlockAnswerer(engine, replace(self.asking, model_name=name))


def _num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class BlockAnswerer:
    """Answers blocks, each of them by itself.

    Attributes:
        engine: decodes the lines.
        asking: how lines are answered.
    """

    engine: Engine
    asking: Asking

    def __call__(self, block: Block) -> Answers:
        records: dict[int, Record] = {}
        errors: dict[int, str] = {}
        asked = {}
        for number, raw in block.numbered:
            try:
                line = read_line(raw, self.asking)
            except LineError as error:
                errors[number] = str(error)
                records[number] = malformed(raw, str(error), number)
                continue
            try:
                asked[number] = line, line.request(self.engine, number)
            except OutriderError as error:
                errors[number] = str(error)
                records[number] = line.failed(str(error), number)
        requests = {number: request for number, (_, request) in asked.items()}
        results, failed = _outcomes(self.engine, requests)
        errors |= failed
        for number, (line, _) in asked.items():
            if number in results:
                records[number] = line.answered(results[number], number)
            else:
                records[number] = line.failed(failed[number], number)
        return Answers(
            "".join(json.dumps(records[number]) + "\n" for number, _ in block.numbered),
            tuple(sorted(errors.items())),
            sum(len(result.token_ids) for result in results.values()),
        )


def _outcomes(
    engine: Engine, requests: Mapping[int, Request]
) -> tuple[dict[int, Result], dict[int, str]]:
    """The results of requests, and the errors of those that have none, by the requests' numbers.

    Longer prompts are admitted first, so that rows of like length are prefilled together.

    Raises:
        Exception: an error of a request that is not an OutriderError, which is a bug.
    """
    scheduler = engine.new_scheduler()
    order = sorted(requests, key=lambda number: -len(requests[number].prompt_ids))
    numbers = {scheduler.add(requests[number]): number for number in order}
    results: dict[int, Result] = {}
    errors: dict[int, str] = {}
    while numbers:
        for request_id, row in scheduler.step():
            if not row.over:
                continue
            number = numbers.pop(request_id)
            if row.error is None:
                results[number] = row.result()
            elif isinstance(row.error, OutriderError):
                errors[number] = str(row.error)
            else:
                raise row.error
    return results, errors
