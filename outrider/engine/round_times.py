"""Fills the governor's tables before the first request.

A few real rounds are run on made-up prompts, for greedy and for sampled rows: with 1, 2, 4, … rows
and six draft lengths, 0 among them. What lies between is interpolated (``governor/costs.py``), and
the rounds of requests correct it. A drafter without models and heads is replaced by one whose
drafts always have full length, because it would find little to copy in such texts.

Whatever delays some rounds in a row is seldom there twice, so all lengths are measured twice, and
of each the faster measurement counts: a length that looked slow would not be tried, and nothing
would correct it. On a processor that other work keeps busy, times say nothing of the next request:
what was measured while the process waited for its turn is dropped, and the governor learns from
real rounds. A review of the draft model is measured, too, for the same reason.

Measuring takes about a second once; larger batches that do not fit are measured while they run. The
times are kept in the cache folder (``governor/saved_times.py``).

The longest drafts come first and rounds without drafts last, since the first rounds after a prefill
take longer, by some 10 % in batches of four rows. If they drafted nothing, drafting would seem to
pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from outrider.core import REVIEW_WIDTH, Budget, Capabilities, Context, Draft, Drafter, Stream
from outrider.core.errors import OutriderError
from outrider.drafters.chain.none import NoDraft, NoState
from outrider.engine.engine import Engine
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.saved_times import (
    ReviewTime,
    RoundTime,
    fingerprint,
    read_times,
    write_times,
)
from outrider.engine.running_batch import RunningBatch
from outrider.sampling import Sampling

SECONDS = 1.5
"""Time after which no further number of rows is measured."""

_LENGTHS = (0, 1, 2, 3, 5)  # and the longest
_SWEEPS = 2  # over all lengths; of each length the faster one counts
_REPEATS = 3  # of each length, in a row; the first is not timed, since its weights are not cached
_LARGEST = 32  # rows
_GROWTH = 1.5  # of the time to measure, where the number of rows doubles
_PROMPT = 16  # tokens
_BUSY = 0.8  # of the time, below which a process that ran did not have a processor to itself

processor_seconds = time.process_time
"""Seconds in which this process had a processor, of all of its threads."""

Report = Callable[[str, float | None], None]


def measure_round_times(
    engine: Engine,
    report: Report | None = None,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] | None = None,
) -> None:
    """Tells an engine's governor how long rounds take, from the cache folder or by measuring.

    Args:
        engine: without a governor, nothing is done. No request may be running.
        report: as of ``load``.
        seconds: when to stop measuring.
        clock: in seconds; None takes ``time.perf_counter``, by which rounds are timed.
    """
    clock = clock or time.perf_counter
    governor, able = engine.governor, engine.drafter.capabilities
    if governor is None or (able.drafts_trees and not able.models):
        return
    key = _key(engine)
    times = read_times(key)
    ends, last = clock() + seconds, 0.0
    missing = [size for size in _sizes(engine.max_batch_size) if size not in times.sizes]
    for number, size in enumerate(missing):
        began, ran = clock(), processor_seconds()
        if began + _GROWTH * last > ends:
            break
        if report is not None:
            report("measuring the time of rounds, once", number / len(missing))
        found, reviews = list[RoundTime](), list[ReviewTime]()
        with suppress(OutriderError):  # the rows do not fit into memory, say
            for greedy in (True, False):
                of_rounds, of_reviews = _measured(engine, size, greedy)
                found += of_rounds
                reviews += of_reviews
        last = clock() - began
        if engine.target.device.type == "cpu" and processor_seconds() - ran < _BUSY * last:
            continue
        times.rounds += found
        times.reviews += reviews
        times.sizes.append(size)
        write_times(key, times)
    governor.assume(times.rounds, times.reviews)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    largest = min(most, _LARGEST)
    sizes = [1 << power for power in range(largest.bit_length())]
    return sorted({*sizes, largest})


def _key(engine: Engine) -> str:
    """The fingerprint of an engine's times."""
    rules = (type(engine.verifier_at(temperature)).__name__ for temperature in (0.0, 1.0))
    able = engine.drafter.capabilities
    return fingerprint(
        (engine.target, *able.models),
        engine.method.name,
        sorted(engine.recipe.drafter_options.items()),
        (able.stops_early, able.fused_lengths),
        *rules,
        engine.kv_dtype,
        engine.num_speculative_tokens,
        engine.governor.sources if engine.governor else None,
    )


def _drafter(engine: Engine) -> Drafter[Any]:
    """What drafts in the measured rounds. Where some source learns from outputs, it is another
    drafter than the engine's, which shall not learn from made-up texts."""
    able = engine.drafter.capabilities
    if not able.models and not able.hidden_layers:
        return FullDrafts()
    return engine.new_drafter() if able.drafts_freely else engine.drafter


@torch.inference_mode()
def _measured(engine: Engine, size: int, greedy: bool) -> tuple[list[RoundTime], list[ReviewTime]]:
    """The times of rounds of so many rows, and of a review."""
    assert engine.governor is not None
    choices = engine.governor.sources.lengths
    lengths = sorted({*(each for each in _LENGTHS if each in choices), choices[-1]}, reverse=True)
    able = engine.drafter.capabilities
    reviews = _REPEATS if able.reviews and able.starts_late else 0
    script = Script([length for length in lengths for _ in range(_REPEATS)] * _SWEEPS, reviews)
    batch = RunningBatch(
        engine.target,
        _drafter(engine),
        lambda greedy: engine.verifier_at(0.0 if greedy else 1.0),
        engine.num_speculative_tokens,
        measure=False,
        verification=engine.verification,
        governor=script,
    )
    length = min(_PROMPT, engine.prompt_limit)
    room = engine.limit - length
    if room < 2:
        return [], []
    sampling = Sampling(temperature=0.0 if greedy else 1.0, max_new_tokens=room, ignore_eos=True)
    prompts = [_prompt(engine, length, row) for row in range(size)]
    batch.admit([engine.row(engine.request(each, sampling)) for each in prompts])
    while script.left and not any(row.over for row in batch.rows):
        batch.step()
    batch.close()
    rounds = [
        RoundTime(greedy, size, asked, *_undisturbed(found))
        for asked, found in script.found.items()
        if len(found) > 1
    ]
    return rounds, [ReviewTime(greedy, size, min(script.reviews))] if script.reviews else []


def _undisturbed(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The seconds of drafting and of the whole round, of the faster one of the sweeps.

    Args:
        found: those of at least two rounds, sweep by sweep.
    """
    sweeps = [found[first : first + _REPEATS] for first in range(0, len(found), _REPEATS)]
    means = [tuple(map(mean, zip(*each[1:], strict=True))) for each in sweeps if len(each) > 1]
    draft, total = min(means, key=lambda seconds: seconds[1])
    return draft, total


def _prompt(engine: Engine, length: int, row: int) -> list[int]:
    """Token ids that differ between rows and from one to the next."""
    return [(31 * row + 7 * place + 1) % engine.target.num_tokens for place in range(length)]


class Script:
    """Asks for given lengths in turn, and notes the times of the rounds.

    Args:
        lengths: the lengths.
        num_reviews: rounds after them that draft nothing and review the draft model.

    Attributes:
        left: the lengths to come, of reviews 0.
        found: by length, the seconds of drafting and of the whole round.
        reviews: seconds of the draft model in reviews.
    """

    def __init__(self, lengths: Sequence[int], num_reviews: int = 0) -> None:
        self.left = [*lengths, *[0, 0] * num_reviews]
        self.found: dict[int, list[tuple[float, float]]] = {}
        self.reviews: list[float] = []
        self._num_reviews = num_reviews

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        """The next length. A review follows a round without a draft, which it looks at."""
        length = min(self.left.pop(0), max(limits))
        if reviewable and len(self.left) < 2 * self._num_reviews and not len(self.left) % 2:
            return Asked(0, 0, [0] * len(limits), behind=REVIEW_WIDTH + 1, reviews=True)
        return Asked(0, length, [min(length, limit) for limit in limits])

    def reads_prompts(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, num_tokens: int
    ) -> bool:
        """Always."""
        return True

    def learn(
        self,
        asked: Asked,
        rows: Sequence[RowMemory],
        accepted: Sequence[int | None],
        greedy: bool,
        draft: float,
        total: float,
        forced: Sequence[int] = (),
        ran_drafter: bool = True,
        reviewed: Sequence[Sequence[float]] = (),
        overlaps: Sequence[Sequence[Sequence[float]]] = (),
    ) -> None:
        """Notes the times of a round, unless some row had no room for the whole draft."""
        if reviewed:
            self.reviews.append(draft)
        elif min(asked.lengths) == asked.length:
            self.found.setdefault(asked.length, []).append((draft, total))


class FullDrafts(NoDraft):
    """Drafts as many tokens as it may, at no cost: the root, again and again."""

    @property
    def capabilities(self) -> Capabilities[Any]:
        return Capabilities(rewindable=True)

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        """The chain of the budget's length."""
        width = budget.max_tokens + 1
        tokens_BN: Tensor = context.root_B[:, None].expand(-1, width)
        return Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")
