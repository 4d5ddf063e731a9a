"""The versions of a draft model's weights: which one serves, how much of its drafts is accepted, and
the way back to the one before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from outrider.engine.round_observer import RowRound
from outrider.engine.stats import Stats
from outrider.runtime import HFModel
from outrider.runtime.weights import StagedWeights, staged
from outrider.train.online.fall import FallTest

Status = Literal["serving", "replaced", "rolled back"]

MOST_PAST = 1000
"""Versions that are remembered; of older ones only the effect is left."""

REFERENCE = 1000
"""How many of the latest values are the reference of the next version's acceptance."""


@dataclass(frozen=True)
class Version:
    """Weights that have served.

    Attributes:
        number: 0 for the weights that the draft model had at first.
        step: the trainer's step after which they are.
        gain: by how much Σ min(p, q) rose on samples held out from training; None if there were
            none.
        alpha_before: α measured over the reference, under the weights before.
        alpha: α measured since they serve.
        rounds: rounds of rows since then.
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


@dataclass(frozen=True)
class Offer:
    """A version that may serve next: its record, its file and its weights as the module stores
    them."""

    version: Version
    path: Path
    weights: StagedWeights


class Versions:
    """Exchanges a draft model's weights. Not thread-safe: the caller holds a lock.

    Args:
        draft: the model, whose weights are its own.
        version: the version that serves.
        path: the file of its weights.
        weights: these weights, as ``plain_weights`` returns them.
        trial_rounds: rounds of rows that a version serves at least, unless it is the first.
        false_alarm: probability of rolling back a version that is accepted as often as before.
        past: the versions that served before.
    """

    def __init__(
        self,
        draft: HFModel,
        version: Version,
        path: Path,
        weights: Mapping[str, Tensor],
        *,
        trial_rounds: int,
        false_alarm: float,
        past: tuple[Version, ...] = (),
    ) -> None:
        self._draft = draft
        self._trial_rounds, self._false_alarm = trial_rounds, false_alarm
        self._now = self.offer(version, path, weights)
        self._before: Offer | None = None
        self._next: Offer | None = None
        self._past = deque(past, maxlen=MOST_PAST)
        self._reference: deque[float] = deque(maxlen=REFERENCE)
        self._values: list[float] = []
        self._test = FallTest((), false_alarm)
        self._stats = Stats()
        self._is_on_trial = False

    def begin(self) -> None:
        """Writes the serving version's weights to the model, which may have others."""
        self._now.weights.write()

    @property
    def serving(self) -> Version:
        """The version that serves, with what has been measured of it."""
        alpha = self._stats.alpha if self._stats.reached else None
        return replace(self._now.version, alpha=alpha, rounds=self._stats.rounds)

    @property
    def all(self) -> tuple[Version, ...]:
        """The versions that have served, the serving one last."""
        return (*self._past, self.serving)

    @property
    def path(self) -> Path:
        """The file of the weights that serve."""
        return self._now.path

    @property
    def is_complete(self) -> bool:
        """Whether no exchange is due."""
        return self._next is None and not self._test.has_fallen

    @property
    def needed(self) -> list[Path]:
        """Files of weights that may yet serve."""
        offers = (self._now, self._before, self._next)
        return [offer.path for offer in offers if offer is not None]

    def offer(self, version: Version, path: Path, weights: Mapping[str, Tensor]) -> Offer:
        """Prepares new weights, without any effect on the model. May be called without the lock."""
        return Offer(version, path, staged(self._draft.module, weights, self._draft.name))

    def propose(self, offer: Offer) -> None:
        """The offer is to serve next; it takes the place of one that has not served yet."""
        self._next = offer

    def count(self, done: RowRound) -> None:
        """Counts what a round accepted of a row's draft."""
        counts = done.counts
        self._stats.count(counts, done.accepted, done.kept)
        if counts.depth and done.kept and counts.reached and counts.reached[0] > 0:
            value = counts.overlap[0] if counts.overlap else 0.0
            value = min(1.0, max(0.0, value))
            self._values.append(value)
            if self._is_on_trial:
                self._test.add(value)

    def exchange(self, at_once: bool = False) -> Literal["rolled back", "swapped"] | None:
        """Changes the weights if it is time; no forward pass of the model may be running.

        Args:
            at_once: whether the serving version's trial may be cut short.
        """
        if self._test.has_fallen and self._before is not None:
            self._serve(self._before, "rolled back")
            self._before, self._next = None, None
            self._is_on_trial = False
            return "rolled back"
        if self._next is None:
            return None
        if self._is_on_trial and len(self._values) < self._trial_rounds and not at_once:
            return None
        before, now, self._next = self._now, self._next, None
        self._serve(now, "replaced")
        self._before = before
        self._is_on_trial = True
        return "swapped"

    def _serve(self, offer: Offer, status: Status) -> None:
        offer.weights.write()
        self._past.append(replace(self.serving, status=status))
        if status == "replaced":
            self._reference.extend(self._values)
        alpha = sum(self._reference) / len(self._reference) if self._reference else None
        version = replace(offer.version, alpha_before=alpha, status="serving")
        self._now = replace(offer, version=version)
        self._values, self._stats = [], Stats()
        self._test = FallTest(self._reference, self._false_alarm)
