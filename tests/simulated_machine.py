"""A machine with known laws, whose clock goes on by the time that its work is said to take."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from outrider.core.errors import IncompatibleError
from outrider.engine import Stats
from outrider.lab.bench.record import BatchRecord, RequestRecord
from outrider.lab.tune.machine import PLAIN, Run, Source
from outrider.lab.tune.quality import Quality

PassTime = Callable[[int, int], float]
"""Seconds of a target pass by rows and width."""


NO_STATS = asdict(Stats())


class SimulatedMachine:
    """Decodes nothing: draws what would be accepted, and adds up what it would take.

    Args:
        acceptance: of each source, by name: the probability that the i-th drafted token is accepted
            if those before it were.
        step: of each source, seconds of drafting one token by the number of rows.
        target: seconds of a target pass.
        overhead: seconds of a round besides.
        prefill: seconds until the first round of a batch.
        ending: seconds after the last round of a batch.
        num_prompts: number of prompts.
        found: of each source, how often it finds anything to draft; 1 where it is not named.
        slowdown: how many times as long everything takes, by the clock.
        compiling: seconds before the first run of each source, length and batch size.
        interrupt_after: number of runs after which Ctrl-C is pressed; None never presses it.
    """

    def __init__(
        self,
        acceptance: dict[str, Sequence[float]],
        step: dict[str, Callable[[int], float]],
        target: PassTime,
        *,
        overhead: float = 0.001,
        prefill: float = 0.02,
        ending: float = 0.0,
        num_prompts: int = 8,
        found: dict[str, float] | None = None,
        broken: Sequence[str] = (),
        slowdown: Callable[[float], float] = lambda now: 1.0,
        compiling: float = 0.0,
        interrupt_after: int | None = None,
    ) -> None:
        self.acceptance = acceptance
        self.step = step
        self.target = target
        self.overhead = overhead
        self.prefill = prefill
        self.ending = ending
        self.num_prompts = num_prompts
        self.found = found or {}
        self.broken = broken
        self.slowdown = slowdown
        self.compiling = compiling
        self.interrupt_after = interrupt_after
        self.now = 100.0
        self.qualities: dict[str, Quality] = {}
        self.runs: list[tuple[str, int, int]] = []
        self._generator = np.random.default_rng(1)

    def clock(self) -> float:
        return self.now

    def pass_seconds(self, num_rows: int, width: int) -> float:
        seconds = self.target(num_rows, width) * self.slowdown(self.now)
        self.now += 6 * seconds
        return seconds

    def run(
        self,
        source: Source,
        length: int,
        batches: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int,
    ) -> Run:
        if source.name in self.broken:
            raise IncompatibleError(f"{source.name} does not fit the target")
        if self.interrupt_after is not None and len(self.runs) >= self.interrupt_after:
            raise KeyboardInterrupt
        state = source.name, length, len(batches[0])
        if state not in self.runs:
            self.now += self.compiling
        self.runs.append(state)
        done = [self._batch(source, length, prompts, max_new_tokens) for prompts in batches]
        return Run(tuple(each for each, _ in done), tuple(depths for _, depths in done))

    def round_seconds(self, source: Source, length: int, rows: int, width: int) -> float:
        drafting = 0.0 if source is PLAIN else length * self.step[source.name](rows)
        return self.target(rows, width) + drafting + self.overhead

    def steady_speed(self, source: Source, length: int, rows: int) -> float:
        """Tokens per second in a long output, of a source that always drafts."""
        tokens, reached = 1.0, 1.0
        for a in self.acceptance.get(source.name, ())[:length]:
            reached *= a
            tokens += reached
        return rows * tokens / self.round_seconds(source, length, rows, length + 1)

    def _batch(
        self, source: Source, length: int, prompts: Sequence[int], tokens: int
    ) -> tuple[BatchRecord, tuple[tuple[int, ...], ...]]:
        slow = self.slowdown(self.now)
        seconds = self.prefill * slow
        left = [tokens] * len(prompts)
        ends: list[list[float]] = [[] for _ in prompts]
        added: list[list[int]] = [[] for _ in prompts]
        depths: list[list[int]] = [[] for _ in prompts]
        while any(left):
            running = [row for row, n in enumerate(left) if n]
            drafted = {row: min(self._found(source, length), left[row] - 1) for row in running}
            width = max(drafted.values()) + 1
            seconds += slow * self.round_seconds(source, length, len(running), width)
            for row in running:
                emitted = self._accepted(source, drafted[row]) + 1
                left[row] -= emitted
                ends[row].append(seconds)
                added[row].append(emitted)
                depths[row].append(drafted[row])
        seconds += self.ending * slow
        self.now += seconds
        requests = tuple(
            RequestRecord(
                prompt, 0, 10, (7,) * tokens, "p" * tokens, "", "length", tuple(ends[row]),
                tuple(added[row]), NO_STATS,
            )
            for row, prompt in enumerate(prompts)
        )  # fmt: skip
        return BatchRecord(seconds, requests), tuple(map(tuple, depths))

    def _found(self, source: Source, length: int) -> int:
        return length if self._generator.random() < self.found.get(source.name, 1.0) else 0

    def _accepted(self, source: Source, drafted: int) -> int:
        for i, a in enumerate(self.acceptance.get(source.name, ())[:drafted]):
            if self._generator.random() >= a:
                return i
        return drafted
