"""How an adaptation stands, and α over the traffic that it has seen."""

from collections import deque
from dataclasses import dataclass

from outrider.engine.round_observer import RowRound
from outrider.train.online.versions import Version

HISTORY_ROUNDS = 64
"""Rounds of rows per point of the history."""
MOST_POINTS = 4096
"""Points that are kept, the latest ones."""


@dataclass(frozen=True)
class Point:
    """α over a stretch of traffic.

    Attributes:
        tokens: tokens that the engine had emitted at its end.
        version: the version that served at its end.
        alpha: α, measured over ``HISTORY_ROUNDS`` rounds of rows.
    """

    tokens: int
    version: int
    alpha: float


@dataclass(frozen=True)
class State:
    """How an adaptation stands.

    Attributes:
        status: ``running``, ``stopped``, or why adaptation is off.
        version: the number of the version that serves.
        on_trial: the number of the version that drafts every other block of rounds; None if none
            does.
        step: steps that the trainer has taken.
        loss: mean divergence of its last step, in nats; None before the first.
        tokens_seen: positions collected so far.
        tokens_emitted: tokens that the engine has emitted while it was watched.
        samples_dropped: samples that came faster than they were learned.
        restarts: how often the trainer was started again after a crash.
        versions: all versions that have served, with their α before and after; the serving one
            last.
        history: α over time.
    """

    status: str
    version: int
    on_trial: int | None
    step: int
    loss: float | None
    tokens_seen: int
    tokens_emitted: int
    samples_dropped: int
    restarts: int
    versions: tuple[Version, ...]
    history: tuple[Point, ...]


class History:
    """Measures α over stretches of ``HISTORY_ROUNDS`` rounds of rows.

    Attributes:
        num_emitted: tokens that the engine has emitted so far.
    """

    def __init__(self) -> None:
        self.num_emitted = 0
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)
        self._rounds, self._overlap, self._reached = 0, 0.0, 0.0

    @property
    def points(self) -> tuple[Point, ...]:
        """One per stretch that is complete."""
        return tuple(self._points)

    def count(self, done: RowRound, version: int) -> None:
        """Adds a round of a row, drafted by a version. Positions after the end of the output do
        not count."""
        self.num_emitted += done.kept
        depth = done.counts.depth
        if done.kept <= done.accepted:
            depth = min(depth, done.kept)
        self._rounds += 1
        self._overlap += sum(done.counts.overlap[:depth])
        self._reached += sum(done.counts.reached[:depth])
        if self._rounds < HISTORY_ROUNDS:
            return
        if self._reached:
            self._points.append(Point(self.num_emitted, version, self._overlap / self._reached))
        self._rounds, self._overlap, self._reached = 0, 0.0, 0.0
