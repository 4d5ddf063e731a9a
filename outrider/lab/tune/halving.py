"""Successive halving: measures the candidates for real, and repeats the better half more often,
until two are left.

Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization",
AISTATS 2016. Every repeat runs plain decoding and the candidates that are left, in random order and
over the same prompts, so that a change in the speed of the machine does not favour one of them.
Candidates are compared by the ratio of their speed to plain decoding's in the same repeats, with
the interval of ``lab/bench/ratio.py``.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.core.errors import OutriderError
from outrider.lab.bench.ratio import speedup
from outrider.lab.bench.record import Repeat
from outrider.lab.tune.machine import PLAIN, Run, Source
from outrider.lab.tune.time_budget import TimeBudget

_DISTURBED = 1.25  # times the median ratio, or its inverse


@dataclass(frozen=True)
class Configuration:
    """A source at a draft length and a batch size.

    Attributes:
        source: of the drafts; plain decoding drafts nothing.
        length: γ.
        batch_size: requests that start together.
    """

    source: Source
    length: int
    batch_size: int

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding."""
        return self.source is PLAIN

    def __str__(self) -> str:
        drafts = "" if self.is_plain else f", {self.length} tokens"
        return f"{self.source.name}{drafts}, batch {self.batch_size}"


@dataclass
class Trials:
    """The repeats of a batch size's candidates and of plain decoding.

    Attributes:
        repeats: of each configuration.
        errors: of the configurations that failed.
    """

    repeats: dict[Configuration, list[Repeat]] = field(default_factory=dict)
    errors: dict[Configuration, str] = field(default_factory=dict)

    def add(self, configuration: Configuration, number: int, seed: int, run: Run) -> None:
        """Adds a repeat."""
        repeat = Repeat(str(configuration), number, seed, "", run.batches)
        self.repeats.setdefault(configuration, []).append(repeat)

    def speed(self, configuration: Configuration) -> float | None:
        """Tokens per second over all repeats; None without one."""
        repeats = self.repeats.get(configuration)
        if not repeats:
            return None
        return sum(each.tokens for each in repeats) / sum(each.seconds for each in repeats)

    def ratio(self, configuration: Configuration) -> dict[str, Any] | None:
        """The speed over plain decoding's in the same repeats, with its interval; None where no
        repeat ran both. Repeats whose ratio is far from the median were disturbed by other work
        while one of the two ran, and are left out."""
        plain = replace(configuration, source=PLAIN, length=0)
        mine = self.repeats.get(configuration, [])
        theirs = {each.number: each for each in self.repeats.get(plain, [])}
        pairs = [(each, theirs[each.number]) for each in mine if each.number in theirs]
        ratios = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
        usual = statistics.median(ratios) if ratios else 0.0
        kept = [
            pair
            for pair, ratio in zip(pairs, ratios, strict=True)
            if usual / _DISTURBED <= ratio <= usual * _DISTURBED
        ]
        return speedup([one for one, _ in kept or pairs], [other for _, other in kept or pairs])


Measure = Callable[[Configuration, int], Run]
"""Runs a configuration over the prompts of one repeat; the number is that of the repeat."""


def successive_halving(
    candidates: Sequence[Configuration],
    plain: Configuration,
    measure: Measure,
    trial_seconds: Callable[[Configuration], float],
    budget: TimeBudget,
    trials: Trials,
    *,
    repeats: int = 1,
    until: float = 1.0,
    seed: int = 0,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> list[Configuration]:
    """Measures the candidates, half as many and each twice as often in every rung. The last rung
    compares two.

    Args:
        candidates: of one batch size, the most promising first.
        plain: plain decoding at that batch size.
        measure: runs one of them.
        trial_seconds: an estimate of the seconds that one run takes.
        budget: of the whole tuning.
        trials: where repeats are added, one by one, so that an interruption loses none.
        repeats: of the first rung.
        until: the share of the whole time by which the last repeat must have ended.
        seed: of the order within a repeat.
        on_stage: called before each run.

    Returns:
        The candidates that were measured, the fastest first.
    """
    left = list(candidates)
    number, per_rung = 0, repeats
    while left:
        for _ in range(per_rung):
            left = [each for each in left if each not in trials.errors]
            wanted = [plain, *left]
            seconds = sum(map(trial_seconds, wanted))
            what = f"repeat {number + 1} of {_listed(left)}"
            if not left or not budget.allows(what, seconds, until):
                return _ranked(candidates, trials)
            random.Random(f"{seed}/{plain.batch_size}/{number}").shuffle(wanted)
            for each in wanted:
                on_stage(f"{each}, repeat {number + 1}")
                try:
                    trials.add(each, number, seed + number, measure(each, number))
                except OutriderError as error:
                    if each.is_plain:
                        raise
                    trials.errors[each] = str(error)
            number += 1
        if len(left) <= 2:
            break
        left = _ranked(left, trials)[: (len(left) + 1) // 2]
        per_rung *= 2
    return _ranked(candidates, trials)


def num_runs(candidates: int) -> int:
    """Runs of a successive halving with one repeat in its first rung, those of plain decoding
    included."""
    runs, per_rung, left = 0, 1, candidates
    while left:
        runs += per_rung * (left + 1)
        if left <= 2:
            break
        left, per_rung = (left + 1) // 2, 2 * per_rung
    return runs


def _ranked(candidates: Sequence[Configuration], trials: Trials) -> list[Configuration]:
    """The candidates that were measured, by their ratio to plain decoding."""
    ratios = {each: trials.ratio(each) for each in candidates}
    measured = {each: ratio["ratio"] for each, ratio in ratios.items() if ratio is not None}
    return sorted(measured, key=lambda each: -measured[each])


def _listed(candidates: Sequence[Configuration]) -> str:
    if len(candidates) < 3:
        return " and ".join(map(str, candidates))
    return f"{len(candidates)} configurations at batch {candidates[0].batch_size}"
