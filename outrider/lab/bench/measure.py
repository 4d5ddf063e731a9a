"""Runs a cell once over its data set and notes when its rounds end.

The requests of a batch start together, and the next batch starts when all of them have ended. A
batch's time begins when its requests are added, so it includes admission and prefill; tokenisation
is not timed. The clock is read once per round, after the round's device-to-host copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from outrider.engine import Engine
from outrider.engine.request import Request, Row
from outrider.lab.bench.record import BatchRecord, RequestRecord
from outrider.lab.data import Example
from outrider.sampling import Sampling

Clock = Callable[[], float]

_TURNS = 64  # request numbers of one example, so that no two requests share their random numbers


@dataclass(frozen=True)
class Asked:
    """An example of a data set, at one of its turns.

    Attributes:
        index: of the example in the data set.
        turn: from 0.
        example: with the conversation so far as its prompt.
    """

    index: int
    turn: int
    example: Example


def run_examples(
    engine: Engine,
    examples: Sequence[Example],
    sampling: Sampling,
    batch_size: int,
    clock: Clock = time.perf_counter,
) -> Iterator[BatchRecord]:
    """Continues all examples; one record per batch and turn.

    Args:
        engine: has at least ``batch_size`` rows.
        examples: of a data set.
        sampling: of all requests.
        batch_size: examples that run together.
        clock: in seconds.

    Raises:
        OutriderError: the error of the first request that failed.
    """
    for start in range(0, len(examples), batch_size):
        chunk = enumerate(examples[start : start + batch_size], start)
        asked = [Asked(index, 0, example) for index, example in chunk]
        while asked:
            record = run_batch(engine, asked, sampling, clock)
            yield record
            asked = [
                Asked(one.index, one.turn + 1, one.example.after(done.text))
                for one, done in zip(asked, record.requests, strict=True)
                if one.example.later
            ]


def run_batch(
    engine: Engine, asked: Sequence[Asked], sampling: Sampling, clock: Clock
) -> BatchRecord:
    """Runs requests that start together until all of them have ended."""
    requests = [
        engine.request(
            as_prompt(one.example),
            sampling_of(one.example, sampling, engine),
            request_number=one.index * _TURNS + one.turn,
        )
        for one in asked
    ]
    times = Times(len(requests))
    _synchronise(engine.target.device)
    began = clock()
    rows = _run(engine, requests, times, clock)
    _synchronise(engine.target.device)
    seconds = clock() - began
    for row in rows:
        if row.error is not None:
            raise row.error
    return BatchRecord(
        seconds,
        tuple(
            RequestRecord.of(one.index, one.turn, row, *times.of(number, began))
            for number, (one, row) in enumerate(zip(asked, rows, strict=True))
        ),
    )


class Times:
    """When the rounds of some requests ended, and the lengths of their outputs then."""

    def __init__(self, num: int) -> None:
        self._ends: list[list[float]] = [[] for _ in range(num)]
        self._lengths: list[list[int]] = [[0] for _ in range(num)]

    def note(self, number: int, now: float, length: int) -> None:
        """A round of a request ended."""
        self._ends[number].append(now)
        self._lengths[number].append(length)

    def of(self, number: int, began: float) -> tuple[list[float], list[int]]:
        """Seconds from ``began`` to the end of each round of a request; tokens of each."""
        lengths = self._lengths[number]
        tokens = [after - before for before, after in pairwise(lengths)]
        return [end - began for end in self._ends[number]], tokens


def _run(engine: Engine, requests: Sequence[Request], times: Times, clock: Clock) -> list[Row]:
    scheduler = engine.new_scheduler()
    numbers = {scheduler.add(request): number for number, request in enumerate(requests)}
    rows: dict[int, Row] = {}
    while len(rows) < len(requests):
        progress = scheduler.step()
        now = clock()
        for request_id, row in progress:
            times.note(numbers[request_id], now, len(row.token_ids))
            if row.over:
                rows[numbers[request_id]] = row
    return [rows[number] for number in range(len(requests))]


def sampling_of(example: Example, sampling: Sampling, engine: Engine) -> Sampling:
    """The sampling parameters of one request: an example whose reference is forced as the output
    ends where that does."""
    if not example.forced:
        return sampling
    tokenizer: Any = engine.target.tokenizer
    tokens = tokenizer(example.reference, add_special_tokens=False)["input_ids"]
    tokens = tokens[: sampling.max_new_tokens]
    return replace(
        sampling, forced=dict(enumerate(tokens)), max_new_tokens=len(tokens), ignore_eos=True
    )


def as_prompt(example: Example) -> Any:
    """The prompt as the engine takes it."""
    return example.prompt if isinstance(example.prompt, str) else list(example.prompt)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
