"""What is known of each configuration's speed, predicted from what a tuning has measured so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider.lab.tune.acceptance import Acceptance
from outrider.lab.tune.answer import Estimate
from outrider.lab.tune.costs import RestTable
from outrider.lab.tune.halving import Configuration
from outrider.lab.tune.machine import PLAIN
from outrider.lab.tune.predict import NOTHING_DRAFTED, RoundTimes, predicted_speed
from outrider.lab.tune.tuning import Tuning


class Estimator:
    """Estimates configurations that were not run, or not yet.

    Args:
        tuning: what was measured; read anew for each estimate.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def estimates(self, size: int, batches: Sequence[Sequence[int]]) -> list[Estimate]:
        """The estimates of all configurations at a batch size, plain decoding first.

        Args:
            size: of the batches.
            batches: the prompts of each batch that is to run.
        """
        plain = Configuration(PLAIN, 0, size)
        plain_speed = self._predicted(plain, batches)
        found = [self._estimate(plain, plain_speed, plain_speed)]
        for source in self._tuning.sources:
            if source.name not in self._tuning.rests:
                continue
            for length in source.lengths:
                each = Configuration(source, length, size)
                found.append(self._estimate(each, self._predicted(each, batches), plain_speed))
        return found

    def lengths(self, batches: Sequence[Sequence[int]]) -> dict[int, int]:
        """The lengths of the outputs; of prompts that were not decoded, the mean."""
        known = self._tuning.output_tokens
        mean = round(sum(known.values()) / len(known))
        return {prompt: known.get(prompt, mean) for batch in batches for prompt in batch}

    def expected_pass(self, acceptance: Acceptance | None, length: int, size: int) -> float:
        """Mean seconds of the target's passes in a run: the width is that of the longest draft of
        the batch's rows."""
        passes = self._tuning.passes
        rounds = [] if acceptance is None else acceptance.all_rounds
        if not rounds:
            return passes.time(size, length + 1)
        total, below = 0.0, 0.0
        for depth in range(length + 1):
            share = sum(each.drafted <= depth for each in rounds) / len(rounds)
            total += (share**size - below) * passes.time(size, depth + 1)
            below = share**size
        return total

    def times(self, configuration: Configuration) -> RoundTimes:
        """The times of a configuration's rounds."""
        tuning, source = self._tuning, configuration.source
        plain = {
            size: seconds - tuning.passes.time(size, 1)
            for size, seconds in tuning.plain_rounds.items()
        }
        if configuration.is_plain:
            own = RestTable({(b, 0): each for b, each in plain.items()}, tuning.plain_outside)
        else:
            own = tuning.rests[source.name]
        rest = partial(own.time, length=configuration.length, scale=tuning.plain_rounds)
        return RoundTimes(tuning.passes.time, lambda rows: rest(rows), own.outside_of)

    def _predicted(self, configuration: Configuration, batches: Sequence[Sequence[int]]) -> float:
        source, length = configuration.source, configuration.length
        acceptance = self._tuning.acceptance.get(source.name, NOTHING_DRAFTED)
        return predicted_speed(
            acceptance,
            length,
            self.times(configuration),
            batches,
            self.lengths(batches),
            seed=self._tuning.settings.seed,
        )

    def _estimate(self, configuration: Configuration, predicted: float, plain: float) -> Estimate:
        trials = self._tuning.trials
        repeats = trials.repeats.get(configuration, ())
        ratio = {"ratio": 1.0, "low": None, "high": None} if configuration.is_plain else None
        if repeats and not configuration.is_plain:
            ratio = trials.ratio(configuration)
        if not repeats or ratio is None:
            return Estimate(configuration, predicted, predicted / plain)
        return Estimate(
            configuration,
            predicted,
            predicted / plain,
            trials.speed(configuration),
            ratio["ratio"],
            ratio["low"],
            ratio["high"],
            len(repeats),
        )
