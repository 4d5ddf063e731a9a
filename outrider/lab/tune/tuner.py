"""Tuning: measures every source briefly, predicts all configurations, measures the best for real.

1. *Probing.* Plain decoding at each batch size. Then the target's forward passes by rows and width,
   and each source with its longest and with a short draft, those without a model first: acceptance
   by position, and the time of rounds. Plain decoding runs again after each, and their times are
   divided by how much slower it has become: other work on the machine may make everything slower by
   a third, for minutes, and compilation may lie between two of them. Takes about half of the time.
2. *Prediction* of every source, draft length and batch size.
3. *Trials*: successive halving of the best predictions at each batch size, interleaved with plain
   decoding, as often as there is time.

How much each of them measures follows from the times measured so far, so that the whole ends within
the minutes that were given. What does not fit is left out, and named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from outrider.core.errors import InvalidParameterError, OutriderError
from outrider.lab.tune.acceptance import Acceptance
from outrider.lab.tune.answer import Estimate, choose
from outrider.lab.tune.costs import RestTable
from outrider.lab.tune.estimator import Estimator
from outrider.lab.tune.halving import Configuration, num_runs, successive_halving
from outrider.lab.tune.machine import PLAIN, Machine, Run, Source, rounds_of
from outrider.lab.tune.time_budget import TimeBudget
from outrider.lab.tune.tuning import LEAST_TOKENS, TuneSettings, Tuning

T = TypeVar("T")

PROBING = 0.45
"""The share of the time at the start of the tuning after which nothing more is probed."""
SHORT = 2
"""The shorter draft length at which rounds are timed."""
_FINALISTS, _PER_SOURCE = 8, 4
_MOST_REPEATS = 8  # of the first rung of trials; the last one has four times as many
_PROBE_PROMPTS = 4  # at least, so that one does not decide; a single one where time is short
_FIRST_TOKENS = 4  # of the run that warms plain decoding up
_UNSTEADY = 1.1  # plain rounds that take this many times as long as the last ones
_ATTEMPTS = 3  # at a probe while they are unsteady
_FIRST_GUESS = 3.0  # rounds of a source whose time is not known yet, over plain decoding's
_HOPELESS = 0.8  # predicted ratios below this are not measured, unless nothing else is there


class Tuner:
    """Tunes on one machine.

    Args:
        machine: decodes and measures.
        sources: the candidates, the most promising first: the last ones are left out first, but
            those with a draft model or head before those without.
        settings: what to tune for.
        on_stage: called with what is being measured, and the share of the time that is over.
        began: when the time began, by the machine's clock; None is now.

    Raises:
        InvalidParameterError: no prompts, or no sources.
    """

    def __init__(
        self,
        machine: Machine,
        sources: Sequence[Source],
        settings: TuneSettings,
        on_stage: Callable[[str, float], None] = lambda stage, share: None,
        began: float | None = None,
    ) -> None:
        if not machine.num_prompts:
            raise InvalidParameterError(
                "data: there are no prompts to tune on; give a few that are like those that the "
                "model will get"
            )
        if not sources:
            raise InvalidParameterError(
                "sources: there is nothing to choose from; name a draft model, a head or a method"
            )
        self.machine = machine
        self._settings = settings
        self._on_stage = on_stage
        self._budget = TimeBudget(60 * settings.minutes, machine.clock, began)
        before = self._budget.spent / self._budget.seconds
        self._probed_by = before + PROBING * (1 - before)
        self._tokens = settings.max_new_tokens
        self._probe_prompts = _PROBE_PROMPTS
        self._slowdown = 1.0  # of the last plain rounds, over the first ones at their batch size
        self._tried: dict[int, list[list[int]]] = {}
        # a draft model has programs for each length, whose compilation may take all of the time
        self._probed = sorted(sources, key=lambda source: source.draft is not None)
        self.tuning = Tuning(settings, tuple(sources))
        self._estimator = Estimator(self.tuning)

    def run(self) -> Tuning:
        """Measures and answers.

        Raises:
            InvalidParameterError: there is not enough time to measure anything, or no source works.
            KeyboardInterrupt: Ctrl-C before anything was known. Later, the answer is that of what
                was measured until then.
        """
        try:
            self._probe()
            self._answer()
            self._try()
        except KeyboardInterrupt:
            if not self.tuning.acceptance:
                raise
            self.tuning.interrupted = True
        self._answer()
        self.tuning.seconds = self._budget.spent
        self.tuning.left_out = self._budget.left_out
        self.tuning.qualities = self.machine.qualities
        return self.tuning

    # ----------------------------------------------------------------------------------- probing

    def _probe(self) -> None:
        sizes = self._settings.batch_sizes
        self._plain(sizes[0], _FIRST_TOKENS)
        self._check_time()
        self._plan_probes()
        self._plain(sizes[0], self._tokens)
        self._pass_times(sizes[0])
        for source in self._probed:
            self._source(source, sizes[0])
        for size in sizes[1:]:
            if not self._fits(f"batch {size}", self._plain_estimate(size)):
                continue
            self._plain(size, self._tokens)
            self._pass_times(size)
            for source in self._probed:
                if source.name in self.tuning.acceptance:
                    self._source(source, size)
        if not self.tuning.acceptance:
            self._nothing_works()

    def _plain(self, size: int, tokens: int) -> None:
        batches = self._batches(size)
        run = self._run(PLAIN, 0, batches, tokens)
        self._learn_lengths(run, tokens)
        self.tuning.plain_rounds[size] = self._round_seconds(run)
        self.tuning.plain_outside[size] = run.outside_seconds
        self._slowdown = 1.0

    def _learn_lengths(self, run: Run, limit: int) -> None:
        """Notes how long outputs get: to the full length, unless they ended by themselves."""
        for batch in run.batches:
            for request in batch.requests:
                num = len(request.token_ids)
                reached = num if num < limit else self._settings.max_new_tokens
                self.tuning.output_tokens[request.example] = reached

    def _pass_times(self, size: int) -> None:
        longest = max(source.longest for source in self.tuning.sources)
        widths = sorted({1, 2, 3, *(w for w in (5, 9, 13, 17, 33) if w <= longest), longest + 1})
        self._stage(f"forward passes at batch {size}")
        found, plain = self._steady(
            lambda: {width: self.machine.pass_seconds(size, width) for width in widths}, size
        )
        # Passes are medians, too. Their share in a round is the same with and without other work.
        now = plain.median_round_seconds or self._round_seconds(plain)
        for width, seconds in found.items():
            in_round = seconds / now
            self.tuning.passes.seconds[size, width] = in_round * self.tuning.plain_rounds[size]

    def _steady(self, measure: Callable[[], T], size: int) -> tuple[T, Run]:
        """What is measured, and plain decoding right after it. Where that has become faster or
        slower since it last ran, the change may have come in the middle, so it is measured again,
        twice at most."""
        for again in reversed(range(_ATTEMPTS)):
            before, began = self._slowdown, self._budget.spent
            found = measure()
            plain = self._run(PLAIN, 0, self._batches(size), self._tokens)
            self._slowdown = self._round_seconds(plain) / self.tuning.plain_rounds[size]
            took = self._budget.spent - began
            is_steady = 1 / _UNSTEADY < self._slowdown / before < _UNSTEADY
            if is_steady or not again or took > self._budget.left_until(self._probed_by):
                break
        return found, plain

    def _source(self, source: Source, size: int) -> None:
        """Probes a source at a batch size: its longest draft first, then a short one."""
        known = self.tuning.rests.get(source.name)
        lengths = sorted({source.longest, *(n for n in (SHORT,) if n in source.lengths)})
        for length in reversed(lengths):
            what = f"{source.name} with {length} tokens at batch {size}"
            seconds = self._source_estimate(source, length, size) + self._plain_estimate(size)
            if not self._fits(what, seconds):
                return
            try:
                decode = partial(self._run, source, length, self._batches(size), self._tokens)
                run, _ = self._steady(decode, size)
            except OutriderError as error:
                if known is None:
                    self.tuning.errors[source.name] = str(error)
                return
            self._learn(source, length, size, run)

    def _learn(self, source: Source, length: int, size: int, run: Run) -> None:
        tuning, name, slowdown = self.tuning, source.name, self._slowdown
        found = rounds_of(run, self._tokens, length)
        if length == source.longest and found:
            before = tuning.acceptance.get(name, Acceptance({}, source.fades))
            tuning.acceptance[name] = before.and_of(found)
        if name not in tuning.acceptance:
            tuning.errors[name] = "no output was long enough to measure its acceptance"
            return
        rest = tuning.rests.setdefault(name, RestTable())
        pass_seconds = self._estimator.expected_pass(
            Acceptance(found) if found else None, length, size
        )
        rest.seconds[size, length] = self._round_seconds(run) / slowdown - pass_seconds
        if length == source.longest:  # until a short draft is timed, a round without one is
            rest.seconds[size, 0] = tuning.plain_rounds[size] - tuning.passes.time(size, 1)
        else:
            rest.seconds.pop((size, 0), None)
        rest.outside[size] = run.outside_seconds / slowdown

    # ------------------------------------------------------------------------------- predictions

    def _answer(self) -> None:
        """Predicts all configurations and chooses with what is measured so far."""
        estimates: list[Estimate] = []
        for size in self.tuning.plain_rounds:
            batches = self._tried.get(size) or self._trial_batches(size, self._few_prompts(size))
            estimates += self._estimator.estimates(size, batches)
        self.tuning.answer = choose(estimates)

    # ------------------------------------------------------------------------------------ trials

    def _try(self) -> None:
        assert self.tuning.answer is not None
        sizes = list(self.tuning.plain_rounds)
        for number, size in enumerate(sizes):
            share = self._budget.spent / self._budget.seconds
            until = share + (1 - share) / (len(sizes) - number)
            self._try_at(size, until)

    def _try_at(self, size: int, until: float) -> None:
        """Successive halving at a batch size, until a share of the time is over."""
        assert self.tuning.answer is not None
        here = [e for e in self.tuning.answer.estimates if e.configuration.batch_size == size]
        plain = next(each for each in here if each.configuration.is_plain)
        finalists = _finalists([each for each in here if not each.configuration.is_plain])
        finalists = self._warmed(finalists, until)
        if not finalists:
            return
        speeds = {each.configuration: each.predicted for each in (plain, *finalists)}
        seconds = self._budget.left_until(until)
        prompts, repeats = self._trial_extent(size, seconds, speeds)
        batches = self._trial_batches(size, prompts)
        self._tried[size] = batches
        lengths = self._estimator.lengths(batches)
        planned = sum(lengths[each] for batch in batches for each in batch)
        successive_halving(
            [each.configuration for each in finalists],
            plain.configuration,
            lambda one, number: self._trial(one, batches, number),
            lambda one: planned / speeds[one],
            self._budget,
            self.tuning.trials,
            repeats=repeats,
            until=until,
            seed=self._settings.seed,
            on_stage=self._stage,
        )

    def _warmed(self, finalists: list[Estimate], until: float) -> list[Estimate]:
        """The candidates that are ready to be timed. Compiling what a new draft length needs can
        take longer than all trials, so it is done before these are planned, for as many of the
        candidates as half of the time allows; at least one."""
        left = self._budget.left_until(until)
        if left <= 0:
            return finalists  # the trials are left out, too, and are named then
        ends = self.machine.clock() + left / 2
        found: list[Estimate] = []
        for each in finalists:
            one = each.configuration
            if found and self.machine.clock() > ends:
                self._budget.left_out.append(f"trials of {one}")
                continue
            batches = self._trial_batches(one.batch_size, one.batch_size)
            try:
                self._run(one.source, one.length, batches, _FIRST_TOKENS)
            except OutriderError as error:
                self.tuning.trials.errors[one] = str(error)
                continue
            found.append(each)
        return found

    def _trial(self, one: Configuration, batches: Sequence[Sequence[int]], number: int) -> Run:
        tokens, seed = self._settings.max_new_tokens, self._settings.seed + number
        run = self.machine.run(one.source, one.length, batches, tokens, seed)
        if one.is_plain:
            self._learn_lengths(run, tokens)
        return run

    def _trial_extent(
        self, size: int, seconds: float, speeds: Mapping[Configuration, float]
    ) -> tuple[int, int]:
        """How many prompts a trial decodes, and how often all candidates do: so that the halving
        takes the seconds, but no more prompts than there are, and all of these before any twice."""
        per_token = sum(1 / speed for speed in speeds.values()) / len(speeds)
        per_batch = size * self._settings.max_new_tokens * per_token
        fitting = max(1, int(0.8 * seconds / (num_runs(len(speeds) - 1) * per_batch)))
        batches = min(fitting, math.ceil(self.machine.num_prompts / size))
        return size * batches, min(fitting // batches, _MOST_REPEATS)

    def _few_prompts(self, size: int) -> int:
        """How many prompts a prediction is for while no trial is planned."""
        return max(size, min(self.machine.num_prompts, 8))

    def _trial_batches(self, size: int, prompts: int) -> list[list[int]]:
        num = self.machine.num_prompts
        order = [index % num for index in range(math.ceil(prompts / size) * size)]
        return [order[start : start + size] for start in range(0, len(order), size)]

    # ------------------------------------------------------------------------------------- parts

    def _batches(self, size: int) -> list[list[int]]:
        """The batches of a probe."""
        prompts = min(self._probe_prompts, self.machine.num_prompts)
        return self._trial_batches(size, max(size, prompts))

    def _run(
        self, source: Source, length: int, batches: Sequence[Sequence[int]], tokens: int
    ) -> Run:
        size = len(batches[0])
        self._stage(f"{source.name}, {length} tokens, batch {size}" if length else source.name)
        return self.machine.run(source, length, batches, tokens, self._settings.seed)

    def _round_seconds(self, run: Run) -> float:
        """Seconds of a round; of outputs with a single round, of all of it."""
        return run.round_seconds or run.seconds / len(run.batches)

    def _plain_estimate(self, size: int) -> float:
        """Seconds that a probe of plain decoding will take: in proportion to the last batch size,
        which is more than it takes where passes are bound by memory."""
        last = max(self.tuning.plain_rounds)
        round_seconds = self.tuning.plain_rounds[last] * size / last
        return self._tokens * len(self._batches(size)) * round_seconds

    def _source_estimate(self, source: Source, length: int, size: int) -> float:
        """Seconds that a probe of a source will take, from what is known of it."""
        tuning, plain = self.tuning, self.tuning.plain_rounds[size]
        rest = tuning.rests.get(source.name)
        rounds = self._tokens * len(self._batches(size))
        if rest is None:
            return rounds * _FIRST_GUESS * plain
        times = self._estimator.times(Configuration(source, length, size))
        rounds_per_token = 1 / tuning.acceptance[source.name].tokens(length)
        return rounds * rounds_per_token * (times.target(size, length + 1) + times.rest(size))

    def _plan_probes(self) -> None:
        """Sets the length of a probe's outputs: as long as all probes fit into their share. With
        too little time for outputs of the least length, a probe is of a single prompt."""
        fit = self._fitting_tokens()
        if fit < LEAST_TOKENS:
            self._probe_prompts = 1
            fit = self._fitting_tokens()
        self._tokens = max(LEAST_TOKENS, min(fit, self._settings.max_new_tokens))

    def _fitting_tokens(self) -> int:
        """The length of outputs with which all probes fit into their share, if a round takes as
        long as a plain one in proportion to the root of the batch size."""
        size = self._settings.batch_sizes[0]
        probes = 2 * (1 + 2 * len(self.tuning.sources))  # plain decoding follows each
        rounds = sum(
            probes * len(self._batches(other)) * math.sqrt(other / size)
            for other in self._settings.batch_sizes
        )
        return int(PROBING * self._budget.left / (rounds * self.tuning.plain_rounds[size]))

    def _check_time(self) -> None:
        """Raises InvalidParameterError where not even one source at one batch size fits."""
        size = self._settings.batch_sizes[0]
        each = self.tuning.plain_rounds[size]
        rounds = (1 + 2 * _FIRST_GUESS) * LEAST_TOKENS
        spent, probing = self._budget.spent, rounds * each / PROBING
        needed = spent + probing
        if needed > self._budget.seconds:
            before = again = ""
            if spent > probing:
                before = f"loading and compiling took {_rounded_up(spent / 60):g} minutes, and "
                again = "; what was compiled is kept, so that less time may suffice now"
            raise InvalidParameterError(
                f"minutes={self._settings.minutes:g}: too short to measure anything: "
                f"{before}on this machine a plain round at batch {size} takes "
                f"{1000 * each:.3g} ms, so that tuning needs at least "
                f"{_rounded_up(needed / 60):g} minutes{again}"
            )

    def _nothing_works(self) -> None:
        reasons = "; ".join(f"{name}: {error}" for name, error in self.tuning.errors.items())
        if reasons:
            raise InvalidParameterError(f"no source of drafts works here: {reasons}")
        raise InvalidParameterError(
            f"minutes={self._settings.minutes:g}: too short to measure a source; give more"
        )

    def _fits(self, what: str, seconds: float) -> bool:
        """Whether a probe fits; the first source may take the time of the trials, too."""
        until = self._probed_by if self.tuning.acceptance else 1.0
        return self._budget.allows(what, seconds, until)

    def _stage(self, stage: str) -> None:
        self._on_stage(stage, min(1.0, self._budget.spent / self._budget.seconds))


def _finalists(drafting: Sequence[Estimate]) -> list[Estimate]:
    """The best predictions, at most three of a source, without hopeless ones; at least one."""
    ranked = sorted(drafting, key=lambda each: -each.predicted_ratio)
    found: list[Estimate] = []
    for each in ranked:
        same = [one for one in found if one.configuration.source == each.configuration.source]
        hopeless = each.predicted_ratio < _HOPELESS and found
        if len(found) < _FINALISTS and len(same) < _PER_SOURCE and not hopeless:
            found.append(each)
    return found


def _rounded_up(minutes: float) -> float:
    """Minutes with two digits, upwards."""
    digits = 10 ** (1 - math.floor(math.log10(minutes)))
    return math.ceil(minutes * digits) / digits
