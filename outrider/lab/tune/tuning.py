"""What a tuning is for, and what it has measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.core.values import is_finite, is_whole, shown
from outrider.lab.tune.acceptance import Acceptance
from outrider.lab.tune.answer import Answer
from outrider.lab.tune.costs import PassTable, RestTable
from outrider.lab.tune.halving import Trials
from outrider.lab.tune.machine import Source
from outrider.lab.tune.quality import Quality
from outrider.sampling import Sampling

LEAST_TOKENS = 24
"""The shortest outputs that acceptance is measured on."""


@dataclass(frozen=True)
class TuneSettings:
    """What to tune for.

    Attributes:
        batch_sizes: requests that run together, ascending.
        minutes: that the whole may take.
        max_new_tokens: of each output.
        seed: of sampling, order and simulation.

    Raises:
        InvalidParameterError: no batch sizes, or a number outside its range.
    """

    batch_sizes: tuple[int, ...] = (1, 4, 16)
    minutes: float = 5.0
    max_new_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_finite(self.minutes) or not self.minutes > 0:
            raise InvalidParameterError(f"minutes={shown(self.minutes)}: must be above 0")
        sizes = self.batch_sizes
        whole = all(is_whole(each) and each >= 1 for each in sizes)
        if not sizes or not whole or list(sizes) != sorted(set(sizes)):
            raise InvalidParameterError(
                f"batch_sizes={shown(list(sizes))}: must be different whole numbers from 1, "
                f"ascending"
            )
        if not is_whole(self.max_new_tokens) or self.max_new_tokens < LEAST_TOKENS:
            raise InvalidParameterError(
                f"max_new_tokens={shown(self.max_new_tokens)}: must be {LEAST_TOKENS} or more, so "
                f"that outputs have enough rounds to measure acceptance on"
            )


@dataclass
class Tuning:
    """What was measured, and what follows from it.

    Attributes:
        settings: what it was tuned for.
        sources: all candidates; of those without acceptance nothing is known.
        passes: seconds of the target's passes.
        acceptance: of each source, by name.
        rests: seconds of each source's rounds apart from the target's pass, by name.
        plain_rounds: seconds of a plain round by batch size.
        plain_outside: seconds of a batch of plain decoding outside of its rounds, by batch size.
        output_tokens: length of each prompt's output; of those that a probe cut, the longest.
        trials: the real runs.
        errors: why a source could not be measured, by name.
        qualities: how good the outputs of lossy sources are, by name.
        answer: None while nothing is known.
        seconds: that the tuning took.
        left_out: what there was no time for.
        interrupted: whether the user ended it early.
        sampling: the parameters of all outputs; None where nobody says.
    """

    settings: TuneSettings
    sources: tuple[Source, ...]
    passes: PassTable = field(default_factory=PassTable)
    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    rests: dict[str, RestTable] = field(default_factory=dict)
    plain_rounds: dict[int, float] = field(default_factory=dict)
    plain_outside: dict[int, float] = field(default_factory=dict)
    output_tokens: dict[int, int] = field(default_factory=dict)
    trials: Trials = field(default_factory=Trials)
    errors: dict[str, str] = field(default_factory=dict)
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    answer: Answer | None = None
    seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False
    sampling: Sampling | None = None

    def c(self, source: Source, batch_size: int) -> float:
        """How much longer a round gets per drafted token, apart from the target's pass, over the
        time of a plain round."""
        return self.rests[source.name].per_token(batch_size) / self.plain_rounds[batch_size]

    def as_dict(self) -> dict[str, Any]:
        """All numbers as JSON."""
        assert self.answer is not None
        return {
            "answer": self.answer.words(),
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "left_out": self.left_out,
            "errors": self.errors,
            "qualities": {name: each.as_dict() for name, each in self.qualities.items()},
            "batch_sizes": list(self.settings.batch_sizes),
            "max_new_tokens": self.settings.max_new_tokens,
            "plain_round_seconds": {str(b): each for b, each in self.plain_rounds.items()},
            "target_pass_seconds": [
                {"rows": rows, "width": width, "seconds": seconds}
                for (rows, width), seconds in sorted(self.passes.seconds.items())
            ],
            "sources": [self._source(each) for each in self.sources],
            "configurations": [each.as_dict() for each in self.answer.estimates],
        }

    def _source(self, source: Source) -> dict[str, Any]:
        known: dict[str, Any] = {"name": source.name, "method": source.method}
        known |= {"draft": source.draft, "error": self.errors.get(source.name)}
        acceptance = self.acceptance.get(source.name)
        if acceptance is None:
            return known | {"rounds": 0}
        sizes = sorted(self.rests[source.name].measured_rows)
        return known | {
            "rounds": len(acceptance.all_rounds),
            "survival": acceptance.survival(source.longest),
            "acceptance_by_position": acceptance.by_position(source.longest),
            "drafted_per_round": acceptance.drafted(source.longest),
            "c": {str(size): self.c(source, size) for size in sizes},
        }
