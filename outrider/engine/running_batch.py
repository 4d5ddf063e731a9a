"""The running batch: rows join when they are admitted, take part in rounds, leave when finished.

Legend: B rows, N nodes, K columns emitted in a round, V vocabulary, C top tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Drafter,
    Ends,
    Overlap,
    Round,
    VerificationExecutor,
    Verifier,
    run_round,
)
from outrider.engine.admission import Memory, Reservation
from outrider.engine.budget import plan
from outrider.engine.counts import count_columns, overlap_of, read_counts
from outrider.engine.dead_ends import dead_end, first_dead
from outrider.engine.device_read import read
from outrider.engine.logprobs import Logprobs
from outrider.engine.measured_divergence import measured_divergence, per_place
from outrider.engine.request import Request, Row
from outrider.runtime import HFModel
from outrider.sampling import Warp


class RunningBatch:
    """A batch of rows in one target, one drafter and one rule.

    Args:
        target: the model that decides.
        drafter: the source of drafts.
        choose: the verification rule, given whether all rows are greedy.
        num_speculative_tokens: γ.
        measure: whether to work out how far a lossy rule strays.
        memory: the bound of the engine's KV buffers; None sets none.
        verify: how rules are put to drafts; None as they are.
    """

    def __init__(
        self,
        target: HFModel,
        drafter: Drafter[Any],
        choose: Callable[[bool], Verifier],
        num_speculative_tokens: int,
        measure: bool = True,
        memory: Memory | None = None,
        verification: VerificationExecutor | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._draft_models = drafter.capabilities.models
        self._choose = choose
        self._gamma = num_speculative_tokens
        self._measure = measure
        self._reservation = None if memory is None else Reservation(memory)
        self._verification = verification
        self.rows: list[Row] = []
        self._context: Context | None = None
        self._cache: Any = None
        self._state: Any = None

    def room_for(self, waiting: Sequence[Request], most: int) -> int:
        """How many of the waiting requests may be admitted now, in their order; memory is reserved
        for them.

        Args:
            waiting: at least one; more than may be admitted, where there are.
            most: of them.

        Raises:
            OutOfMemoryError: none fits, and no row is running that could make room.
        """
        if self._reservation is None:
            return min(len(waiting), most)
        return self._reservation.admit(len(self.rows), waiting, most)

    @torch.inference_mode()
    def admit(self, rows: Sequence[Row]) -> None:
        """Prefills new rows together and lets them join the running ones."""
        if not rows:
            return
        began = self._clock()
        context = Context.start(
            [row.request.first_ids for row in rows],
            self._warp(rows),
            [row.request.sampling.seed for row in rows],
            [row.request.number for row in rows],
            self._target.device,
            None
            if self._target.decoder_prompt is None
            else [row.request.prompt_ids for row in rows],
            Ends.of(
                [row.ending.token_ids for row in rows],
                [len(row.request.first_ids) + row.ending.left for row in rows],
                self._target.device,
            ),
        )
        cache, state = self._target.start(context), self._drafter.start(context)
        self.rows += rows
        if self._context is None:
            self._context, self._cache, self._state = context, cache, state
        else:
            self._target.join(self._cache, cache)
            self._drafter.join(self._state, state)
            self._context.join(context)
            self._context.distribution = self._warp(self.rows)
        if self._target.device.type == "cuda":  # a round ends with a look at the device instead
            torch.cuda.synchronize(self._target.device)
        self._charge(began)

    @torch.inference_mode()
    def step(self) -> None:
        """One round of all rows."""
        assert self._context is not None
        began = self._clock()
        context = self._context
        verifier = self._choose(context.distribution.greedy)
        round_ = run_round(
            context,
            self._target,
            self._cache,
            self._drafter,
            self._state,
            verifier,
            self._budget(),
            self._verification,
        )
        logprobs = Logprobs.of(round_, [row.request.sampling.logprobs for row in self.rows])
        strayed_BDM = measured_divergence(round_, verifier) if self._measure else None
        self._read(round_, logprobs, overlap_of(round_, verifier.lossless), strayed_BDM)
        self._charge(began)

    def leave(self) -> list[Row]:
        """Removes the finished rows and returns them."""
        finished = [row for row in self.rows if row.finished]
        if finished:
            self._keep(_compacted([not row.finished for row in self.rows]))
        return finished

    def close(self) -> None:
        """Drops all rows, finished or not, and what they hold."""
        self.rows = []
        self._context = self._cache = self._state = None
        if self._reservation is not None:
            self._reservation.clear()

    def _keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
        assert self._context is not None
        with torch.inference_mode():
            if not rows:
                self._state.keep([])  # a drafter may learn from texts that have ended
                self.close()
                return
            self._cache.keep(rows)
            self._state.keep(rows)
            self._context.keep(rows)
            self._context.distribution = self._warp(self.rows)

    def _warp(self, rows: Sequence[Row]) -> Warp:
        samplings = [row.request.sampling for row in rows]
        return Warp(samplings, self._target.num_tokens, self._target.device)

    def _budget(self) -> Budget:
        assert self._context is not None
        room = [
            min(row.ending.left, self._target.draft_room(length) + 1)
            for row, length in zip(self.rows, self._context.lengths, strict=True)
        ]
        return plan(self._gamma, room, self._target.device)

    def _read(
        self,
        round_: Round,
        logprobs: Logprobs,
        overlap: Overlap | None,
        strayed_BDM: Tensor | None,
    ) -> None:
        """The round's one look at the device; hands each row its tokens."""
        assert self._context is not None
        sums = self._context.health.drain()
        sums.sort(key=lambda found: found[0] is not self._target)  # which is blamed first
        counts = count_columns(round_)
        strayed = [] if strayed_BDM is None else [strayed_BDM.flatten(1)]
        dead = [] if (first_B := first_dead(round_)) is None else [first_B]
        overlaps = list(overlap or ())
        own = [*counts, *(s for _, s in sums), *dead, round_.emitted_BK, *overlaps, *strayed]
        lines = read([*own, *logprobs.blocks()])
        starts = [length - 1 for length in self._context.lengths]
        self._context.advance([int(line[0][0]) + 1 for line in lines])
        errors = []
        for b, (row, start, line) in enumerate(zip(self.rows, starts, lines, strict=True)):
            numbers = [number for (number,) in line[: len(counts) + len(sums) + len(dead)]]
            for (model, _), total in zip(sums, numbers[len(counts) :], strict=False):
                if total - total != 0:
                    raise model.non_finite(start)
            emitted = line[len(numbers)]
            tokens = [int(token) for token in emitted[: int(numbers[0]) + 1]]
            wanted = row.request.sampling.logprobs
            chosen, best = logprobs.read(line[len(own) :], len(tokens), wanted)
            places = per_place(line[len(own) - 1]) if strayed else ()
            by_depth = line[len(numbers) + 1 :][: len(overlaps)]
            done = read_counts(round_, numbers[: len(counts)], by_depth, places)
            kept = row.take(tokens, done, chosen, best)
            if dead and numbers[-1] < kept:
                errors.append(dead_end(round_, b, row, int(numbers[-1]), kept))
        if errors:
            raise errors[0]

    def _clock(self) -> tuple[float, float, float]:
        draft = sum(model.watch.seconds() for model in self._draft_models)
        return time.perf_counter(), draft, self._target.watch.seconds()

    def _charge(self, began: tuple[float, float, float]) -> None:
        """Shares the seconds since ``began`` among the rows; the device must be done."""
        total, draft, target = (b - a for a, b in zip(began, self._clock(), strict=True))
        share = 1 / len(self.rows)
        for row in self.rows:
            row.stats.spend(draft * share, target * share, total * share)


def _compacted(stays: list[bool]) -> list[int]:
    """Which row moves to each place, so that no row moves up and few move at all."""
    order = [row for row, stay in enumerate(stays) if stay]
    kept = len(order)
    movers = [row for row in order if row >= kept]
    return [row if stays[row] else movers.pop() for row in range(kept)]
