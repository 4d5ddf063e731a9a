"""The running batch: rows are prefilled, join, take part in rounds, and leave one by one.

Legend: B rows, N nodes, K tokens emitted in a round, M divergences, D drafted positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Drafter,
    Lengths,
    Overlap,
    Round,
    StartsLate,
    VerificationExecutor,
    Verifier,
    commit_round,
    run_round,
)
from outrider.core.health import Checked
from outrider.drafters.chain.none import NoDraft
from outrider.engine.admission import KVMemory, Reservation
from outrider.engine.dead_ends import dead_end, first_dead
from outrider.engine.forced import ForcedTokens, can_force
from outrider.engine.governor.batch_governor import LengthChooser
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.logprobs import Logprobs
from outrider.engine.measured_divergence import by_position, measured_divergence
from outrider.engine.newcomers import Newcomers, warp_of
from outrider.engine.request import Row, TopLogprobs
from outrider.engine.reviewing import Unreviewed
from outrider.engine.round_counts import (
    Line,
    copy_to_host,
    count_columns,
    overlap_of,
    read_counts,
)
from outrider.engine.round_observer import Observation, Observed, RoundObserver, RowRound
from outrider.engine.rules_by_row import RulesByRow
from outrider.runtime import HFModel
from outrider.verifiers import Rejection

_NO_DRAFT = NoDraft()


class RunningBatch:
    """A batch of rows that share one target, one drafter and one verification rule.

    Args:
        target: the model that decides.
        drafter: the source of drafts.
        choose: the verification rule, given whether all rows are greedy.
        num_speculative_tokens: γ.
        measure: whether to measure how far a lossy rule diverges from the target.
        memory: the bound of the engine's KV buffers; None sets none.
        verification: how rules are applied to drafts; None applies them eagerly.
        observed: who watches the rounds.
        governor: chooses how many tokens each round drafts, up to γ; None drafts γ.

    Attributes:
        rows: the rows that take part in rounds.
    """

    def __init__(
        self,
        target: HFModel,
        drafter: Drafter[Any],
        choose: Callable[[bool], Verifier],
        num_speculative_tokens: int,
        measure: bool = True,
        memory: KVMemory | None = None,
        verification: VerificationExecutor | None = None,
        observed: Observed | None = None,
        governor: LengthChooser | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._draft_models = drafter.capabilities.models
        self._choose = choose
        self._gamma = num_speculative_tokens
        self._measure = measure
        self._reservation = None if memory is None else Reservation(memory)
        self._verification = verification
        self._observed = observed or Observed()
        self._governor = governor
        self._memories: list[RowMemory] = []
        self._memory_of: dict[Row, RowMemory] = {}
        self._unreviewed = None if governor is None else Unreviewed(drafter)
        self.rows: list[Row] = []
        self._wanted: list[int | None] = []
        self._wants_logprobs = False
        self._has_rules = False
        self._newcomers: Newcomers | None = None
        self._forced: ForcedTokens | None = None
        self._context: Context | None = None
        self._cache: Any = None
        self._state: Any = None
        self._has_started = True  # the drafter; it has no state before

    @property
    def newcomers(self) -> list[Row]:
        """The rows that are being prefilled."""
        return [] if self._newcomers is None else self._newcomers.rows

    @property
    def num_rows(self) -> int:
        """Rows that take part in rounds or are being prefilled."""
        return len(self.rows) + len(self.newcomers)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens, padding included, that :meth:`prefill` would read."""
        return 0 if self._newcomers is None else self._newcomers.num_tokens

    def room_for(self, waiting: Sequence[Row], most: int) -> int:
        """How many of the waiting rows may be admitted now, in their order; reserves their memory.

        Args:
            waiting: rows in the order of admission, one more than ``most`` where there are so many.
            most: most rows to admit.
        """
        if self._reservation is None:
            return min(len(waiting), most)
        return self._reservation.admit(self.num_rows, waiting, most)

    def admit(self, rows: Sequence[Row]) -> None:
        """Prefills new rows and lets them join, without a round in between."""
        self.begin(rows)
        while self._newcomers is not None:
            self.prefill()

    @torch.inference_mode()
    def begin(self, rows: Sequence[Row]) -> None:
        """Begins the prefill of new rows; earlier newcomers must have joined."""
        assert self._newcomers is None
        began = self._clock()
        self._newcomers = Newcomers(rows, self._target, self._drafter, late=self._starts_late(rows))
        self._charge(began)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Runs the next forward pass over the newcomers' prompts, the target's or one of the
        drafter's models'. After the last one, the newcomers join."""
        newcomers = self._newcomers
        assert newcomers is not None
        began = self._clock()
        if newcomers.are_ready:
            self._join(newcomers)
        else:
            newcomers.step()
        if self._target.device.type == "cuda":  # a round ends with a copy to the host instead
            torch.cuda.synchronize(self._target.device)
        self._charge(began)

    def step(self) -> None:
        """Runs one round of all rows. A row with non-finite logits, or without a token to sample,
        gets an error; the other rows go on."""
        observer = self._observed.observer
        with torch.inference_mode():  # a decorator takes twice as long
            if observer is None:
                self._step(None)
            else:
                with observer.round():
                    self._step(observer)

    def _step(self, observer: RoundObserver | None) -> None:
        assert self._context is not None
        began = self._clock()
        greedy = self._context.distribution.greedy
        verifier = self._rule(greedy)
        drafter: Drafter[Any] = self._forced or self._drafter
        limits = self._limits()
        governor, unreviewed = self._governor, self._unreviewed
        asked = labels_BK = None
        if governor is not None and unreviewed is not None:
            asked = governor.ask(self._memories, limits, greedy, unreviewed.num)
            if not self._has_started and (asked.catches_up or self._forced):
                self._state, self._has_started = self._late_state(self._context), True
            if asked.reviews:
                state = self._state if asked.catches_up else None
                labels_BK = unreviewed.review(state, self._context)
            if self._forced is not None:
                self._forced.limits = limits
        round_ = run_round(
            self._context,
            self._target,
            self._cache,
            drafter if self._has_started else _NO_DRAFT,
            self._state,
            verifier,
            self._budget(limits) if asked is None else self._budget(asked.lengths, asked.free_only),
            self._verification,
        )
        logprobs = Logprobs.of(round_, self._wanted) if self._wants_logprobs else None
        measures = self._measure and not verifier.lossless
        divergence_BDM = None
        if measures and isinstance(verifier, RulesByRow):
            divergence_BDM = verifier.divergences(round_)
        elif measures:
            divergence_BDM = measured_divergence(round_, verifier)
        observation = None if observer is None else observer.observe(round_, self.rows)
        overlap = overlap_of(round_, verifier.lossless)
        accepted, overlaps = self._read(round_, logprobs, overlap, divergence_BDM, observation)
        draft, total = self._charge(began)
        if governor is not None and unreviewed is not None and asked is not None:
            forced: Sequence[int] = ()
            ran_drafter = True
            if self._forced is not None:
                forced, ran_drafter = self._forced.numbers, self._forced.ran_drafter
            reviewed = () if labels_BK is None else labels_BK.tolist()
            by_overlap = isinstance(verifier, Rejection) and round_.draft.is_chain
            governor.learn(
                *(asked, self._memories, accepted, greedy, draft, total, forced, ran_drafter),
                reviewed,
                overlaps=overlaps if by_overlap else (),
            )
            unreviewed.add(round_, verifier, drafted=asked.length > 0)
            self._explain(asked)

    def leave(self) -> list[Row]:
        """Removes the rows that are over and returns them."""
        over = [row for row in self.rows if row.over]
        if over:
            self._keep(_compacted([not row.over for row in self.rows]))
        return over

    def remove(self, row: Row) -> None:
        """Removes a row, wherever it is in its output."""
        if row in self.newcomers:
            self._keep_newcomers([each is not row for each in self.newcomers])
        else:
            self._keep(_compacted([each is not row for each in self.rows]))

    def close(self) -> None:
        """Drops all rows and what they hold. The rows can be resumed in another batch."""
        self._set_rows([])
        self._newcomers = None
        self._context = self._cache = self._state = None
        self._release()

    def _join(self, newcomers: Newcomers) -> None:
        context, cache, state = newcomers.finish()
        if self._context is None:
            self._context, self._cache, self._state = context, cache, state
            self._has_started = not newcomers.late
        else:
            self._target.join(self._cache, cache)
            self._join_state(context, state, late=newcomers.late)
            self._context.join(context)
            self._context.distribution = warp_of(self.rows + newcomers.rows, self._target)
        self._set_rows(self.rows + newcomers.rows)
        if newcomers.late:
            lengths = context.lengths
            for memory, length in zip(self._memories[-len(lengths) :], lengths, strict=True):
                memory.of(0).undrafted = length - 1
        self._newcomers = None

    def _starts_late(self, rows: Sequence[Row]) -> bool:
        """Whether the draft model leaves the prompts of new rows for later: where drafting is not
        expected to pay, it may not run at all."""
        if self._governor is None or not self._drafter.capabilities.starts_late:
            return False
        lengths = [len(row.sequence_ids) for row in rows]
        memories = self._memories + [self._remembered(row) for row in rows]
        most, greedy = [self._gamma] * len(memories), all(each.kind.greedy for each in memories)
        return not self._governor.reads_prompts(memories, most, greedy, max(lengths))

    def _join_state(self, context: Context, state: Any, *, late: bool) -> None:
        """Appends the drafter's state of newcomers; there is none as long as all start late."""
        if late and not self._has_started:
            return
        if not self._has_started:
            assert self._context is not None
            self._state, self._has_started = self._late_state(self._context), True
        self._drafter.join(self._state, self._late_state(context) if late else state)

    def _late_state(self, context: Context) -> Any:
        """The state of a drafter that starts with rows whose prompts it left for later."""
        assert isinstance(self._drafter, StartsLate)
        return self._drafter.start_late(context)

    def _remembered(self, row: Row) -> RowMemory:
        """What the governor remembers of a row, which may be new."""
        if row not in self._memory_of:
            request = row.request
            greedy = request.sampling.greedy
            memory = RowMemory(greedy, request.first_ids, row.token_ids, request.is_repeatable)
            self._memory_of[row] = memory
        return self._memory_of[row]

    def _keep(self, rows: list[int]) -> None:
        self._set_rows([self.rows[row] for row in rows])
        assert self._context is not None
        with torch.inference_mode():
            if not rows:
                self._cache.keep([])  # their keys and values may be those of the next prompt
                if self._has_started:
                    self._state.keep([])  # a drafter may learn from outputs that have ended
                self._context = self._cache = self._state = None
                self._release()
                return
            self._cache.keep(rows)
            if self._has_started:
                self._state.keep(rows)
            self._context.keep(rows)
            self._context.distribution = warp_of(self.rows, self._target)

    @torch.inference_mode()
    def _keep_newcomers(self, stays: list[bool]) -> None:
        assert self._newcomers is not None
        if any(stays):
            self._newcomers.keep(_compacted(stays))
        else:
            self._newcomers = None
            self._release()

    def _set_rows(self, rows: list[Row]) -> None:
        if self._governor is not None and self._unreviewed is not None:
            self._unreviewed.change_rows()
            self._memories = [self._remembered(row) for row in rows]
            self._memory_of = dict(zip(rows, self._memories, strict=True))
        self.rows = rows
        self._wanted = [row.request.sampling.logprobs for row in rows]
        self._wants_logprobs = any(wanted is not None for wanted in self._wanted)
        self._has_rules = any(row.request.rule is not None for row in rows)
        self._forced = self._forcing() if any(map(_has_grammar, rows)) else None

    def _forcing(self) -> ForcedTokens | None:
        """The drafter with the tokens that grammars force in front, in the rows whose rules allow
        it; None if there is no such row."""
        rows = [_has_grammar(row) and self._may_force(row) for row in self.rows]
        if not any(rows):
            return None
        dtype = torch.promote_types(self._target.dtype, torch.float32)
        return ForcedTokens(self._drafter, self._target.num_tokens, dtype, rows)

    def _may_force(self, row: Row) -> bool:
        """Whether the rules that may verify a row allow forced tokens."""
        rules = self._choose(True), row.request.rule or self._choose(False)
        return all(can_force(self._drafter, rule) for rule in rules)

    def _release(self) -> None:
        """Gives back the reserved memory once no row is left."""
        if self._reservation is not None and not self.num_rows:
            self._reservation.clear()

    def _rule(self, greedy: bool) -> Verifier:
        """The verification rule: the engine's, and besides those of rows that have their own where
        rows are sampled. At temperature 0 they all accept the argmax."""
        engines = self._choose(greedy)
        if greedy or not self._has_rules:
            return engines
        return RulesByRow.of([row.request.rule or engines for row in self.rows])

    def _limits(self) -> list[int]:
        """How many tokens each row may draft: at most γ, the engine's and its own, and one less
        than the row may still emit, since the last token of a round is not drafted."""
        assert self._context is not None
        return [
            min(self._gamma_of(row), row.ending.left - 1, self._target.draft_room(length))
            for row, length in zip(self.rows, self._context.lengths, strict=True)
        ]

    def _budget(self, tokens: Sequence[int], free_only: bool = False) -> Budget:
        most, tokens_B = max(tokens), None
        if min(tokens) < most:
            tokens_B = Lengths.of(tokens, self._target.device).device_B
        return Budget(most, tokens_B, free_only)

    def _gamma_of(self, row: Row) -> int:
        own = row.request.num_speculative_tokens
        return self._gamma if own is None else min(self._gamma, own)

    def _read(
        self,
        round_: Round,
        logprobs: Logprobs | None,
        overlap: Overlap | None,
        divergence_BDM: Tensor | None,
        observation: Observation | None,
    ) -> tuple[list[int | None], list[Line]]:
        """Copies the round's numbers to the host, the one device-to-host synchronisation of a
        round; commits the round, and hands each row its tokens or its error.

        Returns:
            By row, how many tokens were accepted, None if the row is over; and, by row, the numbers
            of ``overlap``, none without it.
        """
        assert self._context is not None
        sums = self._context.health.drain(first=self._target)
        counts = count_columns(round_)
        divergences = [] if divergence_BDM is None else [divergence_BDM.flatten(1)]
        dead = [] if round_.dead_BN is None else [first_dead(round_, round_.dead_BN)]
        overlaps = list(overlap or ())
        own = [*counts, *(s for _, s in sums), *dead, round_.emitted_BK, *overlaps, *divergences]
        watched = [] if observation is None else observation.blocks
        requested = [] if logprobs is None else logprobs.blocks()
        lines = copy_to_host([*own, *requested, *watched])
        starts = self._context.lengths  # of before the round: commits make new ones
        accepted = [int(line[0][0]) for line in lines]
        self._commit(round_, accepted)
        num_counts, num_numbers = len(counts), len(counts) + len(sums) + len(dead)
        for b, (row, line) in enumerate(zip(self.rows, lines, strict=True)):
            numbers = [number for (number,) in line[:num_numbers]]
            damaged = _first_damaged(sums, numbers[num_counts:])
            if damaged is not None:
                row.error = damaged.non_finite(starts[b] - 1)
                continue
            tokens = [int(token) for token in line[num_numbers][: accepted[b] + 1]]
            chosen: list[float] = []
            best: list[TopLogprobs] = []
            if logprobs is not None:
                part = line[len(own) :][: len(requested)]
                chosen, best = logprobs.read(part, len(tokens), self._wanted[b])
            measured = divergences and not (row.request.rule or self._choose(False)).lossless
            positions = by_position(line[len(own) - 1]) if measured else ()
            by_depth = line[num_numbers + 1 :][: len(overlaps)]
            forced = 0 if self._forced is None else self._forced.numbers[b]
            done = read_counts(round_, numbers[:num_counts], by_depth, positions, forced)
            kept = row.take(tokens, done, chosen, best)
            if observation is not None:
                watched_line = line[len(own) + len(requested) :]
                seen = RowRound(row, starts[b] - 1, done, accepted[b], kept)
                observation.read(seen, watched_line)
            if dead and numbers[-1] < kept:
                row.error = dead_end(round_, b, row, int(numbers[-1]), kept)
        going = [None if row.over else n for row, n in zip(self.rows, accepted, strict=True)]
        first = num_numbers + 1
        return going, [line[first:][: len(overlaps)] for line in lines] if overlaps else []

    def _commit(self, round_: Round, num_accepted: Sequence[int]) -> None:
        assert self._context is not None
        commit_round(
            self._context,
            self._target,
            self._cache,
            (self._forced or self._drafter) if self._has_started else _NO_DRAFT,
            self._state,
            round_,
            num_accepted,
        )

    def _clock(self) -> tuple[float, float, float]:
        draft = 0.0
        for model in self._draft_models:
            draft += model.watch.seconds()
        return time.perf_counter(), draft, self._target.watch.seconds()

    def _charge(self, began: tuple[float, float, float]) -> tuple[float, float]:
        """Divides the seconds since ``began`` among the rows; the device must be done.

        Returns:
            Seconds in the drafter's models, and in all.
        """
        now = self._clock()
        total, draft, target = now[0] - began[0], now[1] - began[1], now[2] - began[2]
        rows = self.rows + self.newcomers
        share = 1 / len(rows)
        for row in rows:
            row.stats.spend(draft * share, target * share, total * share)
        return draft, total

    def _explain(self, asked: Asked) -> None:
        """Notes in the rows' statistics what the governor chose, and what it believed."""
        share = 1 / len(self.rows)
        for row, length in zip(self.rows, asked.lengths, strict=True):
            row.stats.govern(length, asked.probe, asked.believed, share)


def _first_damaged(
    sums: Sequence[tuple[Checked, Tensor]], totals: Sequence[float]
) -> Checked | None:
    """The first model some of whose logits were not finite, by a row's totals; None if all were."""
    for (model, _), total in zip(sums, totals, strict=False):
        if not math.isfinite(total):
            return model
    return None


def _has_grammar(row: Row) -> bool:
    return row.request.sampling.grammar is not None


def _compacted(stays: list[bool]) -> list[int]:
    """Which row moves to each index, so that no row moves up and few rows move at all."""
    order = [row for row, stay in enumerate(stays) if stay]
    kept = len(order)
    movers = [row for row in order if row >= kept]
    return [row if stays[row] else movers.pop() for row in range(kept)]
