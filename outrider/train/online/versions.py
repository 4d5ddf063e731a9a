"""The versions of the weights that an engine drafts with: which one serves, how much of its
drafts is accepted, and the trial that decides whether the next one takes its place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from outrider.engine.round_observer import RowRound
from outrider.engine.stats import Stats
from outrider.runtime.weights import StagedWeights
from outrider.train.online.subject import Subject
from outrider.train.online.trial import Trial

Status = Literal["serving", "replaced", "rolled back"]
Change = Literal["taken over", "rolled back"]

MOST_PAST = 1000
"""Versions that are remembered."""


@dataclass(frozen=True)
class Version:
    """Weights that have served.

    Attributes:
        number: 0 for the weights that the draft model had at first.
        step: the trainer's step after which they are.
        gain: by how much Σ min(p, q) rose on samples held out from training; None if there were
            none.
        alpha_before: α of the weights before them, measured in alternation with them during their
            trial; None without a trial.
        alpha: α measured in all rounds that drafted with them.
        rounds: how many these are, per row.
        status: what became of them.
    """

    number: int
    step: int
    gain: float | None = None
    alpha_before: float | None = None
    alpha: float | None = None
    rounds: int = 0
    status: Status = "serving"

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Version:
        """A version from its JSON document."""
        return cls(**document)  # type: ignore[arg-type]

    def document(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


class Offer:
    """Weights that may serve.

    Args:
        version: their record.
        path: their file.
        weights: the weights as the module stores them.

    Attributes:
        stats: of the rounds that drafted with them.
    """

    def __init__(self, version: Version, path: Path, weights: StagedWeights) -> None:
        self.version, self.path, self.weights = version, path, weights
        self.stats = Stats()

    @property
    def alpha(self) -> float | None:
        """α as measured so far."""
        return self.stats.alpha if self.stats.reached else None

    def record(self, status: Status) -> Version:
        """The version with what has been measured of it."""
        return replace(self.version, alpha=self.alpha, rounds=self.stats.rounds, status=status)


class Versions:
    """Exchanges the weights of a draft model or a head. Not thread-safe: the caller holds a lock.

    Args:
        subject: whose weights they are.
        version: the version that serves first.
        path: the file of its weights.
        weights: these weights, as ``plain_weights`` returns them; written to the subject.
        trial_rounds: rounds of a trial; 0 lets new versions serve without one.
        false_alarm: probability of rolling back a version that is accepted as often as the one
            before.
        past: the versions that served before.
        rng: decides the order of a trial's blocks.
    """

    def __init__(
        self,
        subject: Subject,
        version: Version,
        path: Path,
        weights: Mapping[str, Tensor],
        *,
        trial_rounds: int,
        false_alarm: float,
        past: tuple[Version, ...] = (),
        rng: random.Random | None = None,
    ) -> None:
        self._subject = subject
        self._trial_rounds, self._false_alarm = trial_rounds, false_alarm
        self._past = deque(past, maxlen=MOST_PAST)
        self._rng = rng or random.Random()
        self._serving = self.offer(version, path, weights)
        self._loaded: Offer | None = None
        self._next: Offer | None = None
        self._challenger: tuple[Offer, Trial] | None = None
        self._load(self._serving)

    @property
    def serving(self) -> Version:
        """The version that serves; during a trial, the one before the trial."""
        return self._serving.record("serving")

    @property
    def all(self) -> tuple[Version, ...]:
        """The versions that have served, the serving one last."""
        return (*self._past, self.serving)

    @property
    def path(self) -> Path:
        """The file of the weights that serve."""
        return self._serving.path

    @property
    def on_trial(self) -> int | None:
        """The number of the version that is on trial."""
        return None if self._challenger is None else self._challenger[0].version.number

    @property
    def needed(self) -> list[Path]:
        """Files of weights that may yet serve."""
        tried = None if self._challenger is None else self._challenger[0]
        return [each.path for each in (self._serving, tried, self._next) if each is not None]

    def offer(self, version: Version, path: Path, weights: Mapping[str, Tensor]) -> Offer:
        """Prepares new weights, without effect on the engine. May be called without the lock."""
        return Offer(version, path, self._subject.stage(weights))

    def propose(self, offer: Offer) -> None:
        """The offer is to be tried next; it takes the place of one that has not been tried yet."""
        self._next = offer

    def count(self, done: RowRound) -> None:
        """Counts what a round accepted of a row's draft."""
        assert self._loaded is not None
        counts = done.counts
        self._loaded.stats.count(counts, done.accepted, done.kept)
        drafted = counts.depth and done.kept and counts.reached and counts.reached[0] > 0
        if drafted and self._challenger is not None:
            value = counts.overlap[0] if counts.overlap else 0.0
            self._challenger[1].add(min(1.0, max(0.0, value)))

    def begin_round(self) -> Change | None:
        """Sees to it that the model has the weights for the next round; no forward pass of it may
        be running."""
        change = self.settle()
        if self._next is not None and self._challenger is None:
            trial = Trial(self._false_alarm, self._rng)
            self._challenger, self._next = (self._next, trial), None
        if self._challenger is not None:
            challenger, trial = self._challenger
            trial.begin_round()
            self._load(challenger if trial.uses_new else self._serving)
        return change

    def close(self) -> None:
        """Breaks off a trial: the model keeps the weights of the serving version."""
        self._challenger = self._next = None
        self._load(self._serving)

    def settle(self) -> Change | None:
        """Ends a trial whose outcome is known. Without trials, lets a new version serve."""
        if self._next is not None and not self._trial_rounds:
            offer, self._next = self._next, None
            return self._take_over(offer, None)
        if self._challenger is None:
            return None
        challenger, trial = self._challenger
        if trial.has_failed:
            self._challenger, self._next = None, None  # the next one came of the failed one
            record = challenger.record("rolled back")
            self._past.append(replace(record, alpha_before=self._serving.alpha))
            self._load(self._serving)
            return "rolled back"
        if trial.num_rounds < self._trial_rounds:
            return None
        self._challenger = None
        return self._take_over(challenger, self._serving.alpha)

    def _take_over(self, offer: Offer, alpha_before: float | None) -> Change:
        self._past.append(self._serving.record("replaced"))
        offer.version = replace(offer.version, alpha_before=alpha_before)
        self._serving = offer
        self._load(offer)
        return "taken over"

    def _load(self, offer: Offer) -> None:
        if self._loaded is not offer:
            offer.weights.write()
            self._loaded = offer
