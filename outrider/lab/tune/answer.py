"""The answer of a tuning: what to use at each batch size, in words and as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.drafters.chain.length_table import LengthTable
from outrider.lab.tune.halving import Configuration
from outrider.lab.tune.machine import Source

WORTHWHILE = 1.02
"""A configuration must be this much faster than plain decoding to be chosen."""


@dataclass(frozen=True)
class Estimate:
    """What is known of a configuration's speed.

    Attributes:
        configuration: the configuration.
        predicted: tokens per second, by prediction.
        predicted_ratio: predicted over plain decoding's prediction.
        measured: tokens per second of real runs; None if there was none.
        ratio: of the real runs to plain decoding's in the same repeats; None likewise.
        low, high: the ratio's interval of 95 %.
        repeats: number of real runs.
    """

    configuration: Configuration
    predicted: float
    predicted_ratio: float
    measured: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    repeats: int = 0

    @property
    def best_ratio(self) -> float:
        """The measured ratio, or the predicted one."""
        return self.predicted_ratio if self.ratio is None else self.ratio

    @property
    def error(self) -> float | None:
        """The relative error of the predicted speed; None without a measurement."""
        return None if self.measured is None else self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """The estimate as JSON."""
        source = self.configuration.source
        return {
            "source": source.name,
            "method": source.method,
            "draft": source.draft,
            "num_speculative_tokens": self.configuration.length,
            "batch_size": self.configuration.batch_size,
            "predicted_tokens_per_second": self.predicted,
            "predicted_ratio": self.predicted_ratio,
            "tokens_per_second": self.measured,
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "repeats": self.repeats,
        }


@dataclass(frozen=True)
class Answer:
    """What to use.

    Attributes:
        best: by batch size, ascending, the fastest configuration; that of plain decoding where none
            is faster.
        estimates: of all configurations, plain decoding included.
    """

    best: dict[int, Estimate]
    estimates: tuple[Estimate, ...]

    @property
    def speculates(self) -> bool:
        """Whether any batch size is faster with speculation."""
        return any(not each.configuration.is_plain for each in self.best.values())

    @property
    def overall(self) -> Source:
        """The one source for an engine that runs at all of these batch sizes: the one with the
        largest product of speed-ups, each at its best draft length or none."""
        chosen = [each.configuration.source for each in self.best.values()]
        return max(dict.fromkeys(chosen), key=lambda source: math.log(self._gain(source)))

    def table(self, source: Source) -> LengthTable:
        """γ of a source by batch size, 0 where plain decoding is faster."""
        return LengthTable.of_measured({size: self._length(source, size) for size in self.best})

    def source_at(self, batch_size: int) -> Source:
        """The fastest source at a batch size, or at the next larger one that was tuned."""
        sizes = sorted(self.best)
        size = next((each for each in sizes if each >= batch_size), sizes[-1])
        return self.best[size].configuration.source

    def words(self) -> str:
        """The answer in plain words, one sentence or two."""
        if not self.speculates:
            sizes = _sizes(list(self.best))
            return f"Do not speculate: plain decoding is the fastest at {sizes}."
        groups, parts, before = self._groups(), [], None
        for number, (each, last) in enumerate(groups):
            is_last = number == len(groups) - 1
            if each.is_plain and number and is_last:
                parts.append("nothing above")
                continue
            thing = "nothing" if each.is_plain else _thing(each, each.source == before)
            bound = "" if len(groups) == 1 else f" up to {'' if number else 'batch '}{last}"
            parts.append(thing + bound)
            before = each.source
        return f"Use {', '.join(parts)}: {self._gains()}."

    def _groups(self) -> list[tuple[Configuration, int]]:
        """Runs of batch sizes with the same source and γ, each with its last batch size."""
        groups: list[tuple[Configuration, int]] = []
        for size, each in self.best.items():
            now = each.configuration
            before = groups[-1][0] if groups else None
            if before and (before.source, before.length) == (now.source, now.length):
                groups[-1] = (before, size)
            else:
                groups.append((now, size))
        return groups

    def _gains(self) -> str:
        found = []
        for size, each in self.best.items():
            if each.configuration.is_plain:
                continue
            how = f"{each.best_ratio:.2f}×"
            if each.ratio is None:
                how = f"about {how} (predicted, not measured)"
            elif each.low is not None and each.high is not None and each.repeats > 1:
                how += f" ({each.low:.2f} to {each.high:.2f})"
            found.append(f"{how} at batch {size}")
        return ", ".join(found)

    def _gain(self, source: Source) -> float:
        gain = 1.0
        for size in self.best:
            gain *= max(1.0, self._best_of(source, size))
        return gain

    def _best_of(self, source: Source, size: int) -> float:
        mine = self._of(source, size)
        return max((each.best_ratio for each in mine), default=1.0)

    def _length(self, source: Source, size: int) -> int:
        """A source's best γ at a batch size; 0 where plain decoding is faster."""
        best = self.best[size]
        if best.configuration.source == source or best.configuration.is_plain:
            return best.configuration.length
        found = max(self._of(source, size), key=lambda each: each.best_ratio, default=None)
        pays = found is not None and found.best_ratio >= WORTHWHILE
        return found.configuration.length if found is not None and pays else 0

    def _of(self, source: Source, size: int) -> list[Estimate]:
        """The estimates of a source at a batch size: the measured ones, if there are any."""
        mine = [
            each
            for each in self.estimates
            if each.configuration.source == source and each.configuration.batch_size == size
        ]
        return [each for each in mine if each.ratio is not None] or mine


def choose(estimates: Iterable[Estimate]) -> Answer:
    """The best configuration at each batch size.

    Where any was measured, those with the most repeats are the candidates: they outlasted the
    others, and the best of many ratios from few repeats is often so by chance. A configuration is
    chosen only if it is at least 2 % faster than plain decoding.

    Args:
        estimates: of all configurations, plain decoding included.
    """
    listed = tuple(estimates)
    best: dict[int, Estimate] = {}
    for size in sorted({each.configuration.batch_size for each in listed}):
        here = [each for each in listed if each.configuration.batch_size == size]
        plain = next(each for each in here if each.configuration.is_plain)
        drafting = [each for each in here if not each.configuration.is_plain]
        most = max((each.repeats for each in drafting), default=0)
        left = [each for each in drafting if each.repeats == most]
        found = max(left, key=lambda each: each.best_ratio, default=None)
        best[size] = found if found is not None and found.best_ratio >= WORTHWHILE else plain
    return Answer(best, listed)


def _thing(configuration: Configuration, again: bool) -> str:
    tokens = f"{configuration.length} token{'' if configuration.length == 1 else 's'}"
    return f"with {tokens}" if again else f"{configuration.source.name} with {tokens}"


def _sizes(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"batch {sizes[0]}"
    return f"batches {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
