"""Engines generate at the same time in one process, a few tokens of one after a few of another.

The speed of a processor that other work shares may change within seconds, by more than engines
differ. Generations that run one after another differ by that change, too; engines that alternate
meet the same changes. The next one is always that whose rows have emitted the fewest tokens, so
that all engines are at about the same place in the output, whatever the length of their drafts.

An engine finds in the caches what the one before it has read: the weights of its target, or those
of a draft model instead. So each goes on for several steps, and of those that are level, the next
one is drawn at random.
"""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from outrider import Engine, Sampling

BURST = 16
"""Tokens for each row until another engine goes on."""


def speeds(
    engines: Mapping[str, Engine], prompts: Sequence[Any], sampling: Sampling
) -> dict[str, float]:
    """Tokens per second of each engine, prefill included, over the seconds of its own steps.

    Args:
        engines: by name.
        prompts: of the batch that each engine decodes.
        sampling: of all rows; their outputs should have the same number of tokens. Its seed is also
            that of the order of engines.
    """
    order = random.Random(sampling.seed)
    runs = {name: _Run(engine, prompts, sampling) for name, engine in engines.items()}
    while running := [run for run in runs.values() if run.open_ids]:
        run = min(running, key=lambda run: (run.num_emitted, order.random()))
        goal = run.num_emitted + BURST * len(prompts)
        while run.open_ids and run.num_emitted < goal:
            run.step()
    return {name: run.num_emitted / run.seconds for name, run in runs.items()}


class _Run:
    """One engine's batch.

    Attributes:
        open_ids: the requests that go on.
        num_emitted: tokens so far, of all rows.
        seconds: of its steps so far.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Any], sampling: Sampling) -> None:
        self._scheduler = engine.new_scheduler()
        self.open_ids = {
            self._scheduler.add(engine.request(prompt, sampling, request_number=number))
            for number, prompt in enumerate(prompts)
        }
        self._emitted = dict.fromkeys(self.open_ids, 0)
        self.seconds = 0.0

    @property
    def num_emitted(self) -> int:
        return sum(self._emitted.values())

    def step(self) -> None:
        """Runs the engine's next step; raises the error that ended a row."""
        began = time.perf_counter()
        progress = self._scheduler.step()
        self.seconds += time.perf_counter() - began
        for request_id, row in progress:
            if row.error is not None:
                raise row.error
            self._emitted[request_id] = len(row.token_ids)
            if row.over:
                self.open_ids.discard(request_id)
