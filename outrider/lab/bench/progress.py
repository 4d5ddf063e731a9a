"""How far a benchmark is, and how long it will still take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Run = tuple[str, int]
"""A repeat of a cell: the cell's key, and the number of the repeat."""


@dataclass(frozen=True)
class Progress:
    """How far a benchmark is.

    Attributes:
        stage: what runs now.
        done: repeats of cells that are over, those of earlier sessions included.
        total: repeats that are planned so far.
        seconds_left: estimate; None before the first repeat.
    """

    stage: str
    done: int
    total: int
    seconds_left: float | None


OnProgress = Callable[[Progress], None]


@dataclass
class Timeline:
    """Counts repeats and estimates the time that is left.

    Attributes:
        on_progress: called with each stage; None shows nothing.
    """

    on_progress: OnProgress | None
    _left: dict[Run, None] = field(default_factory=dict)
    _over: int = 0
    _seconds: dict[str, float] = field(default_factory=dict)

    def plan(self, runs: Iterable[Run]) -> None:
        """These repeats are to be run."""
        self._left.update(dict.fromkeys(runs))

    def skip(self, run: Run) -> None:
        """A repeat need not be run. Cells with one key, such as those of a data set that was given
        twice, share their repeats, which count once."""
        if run in self._left:
            del self._left[run]
            self._over += 1

    def end(self, run: Run, seconds: float) -> None:
        """A repeat is over."""
        self.skip(run)
        self._seconds[run[0]] = seconds

    def stage(self, stage: str) -> None:
        """Something else begins."""
        if self.on_progress is not None:
            total = self._over + len(self._left)
            self.on_progress(Progress(stage, self._over, total, self.seconds_left))

    @property
    def seconds_left(self) -> float | None:
        """A cell's last repeat is the estimate of its next one; where it has none, the mean of the
        others."""
        if not self._seconds:
            return None
        mean = sum(self._seconds.values()) / len(self._seconds)
        return sum(self._seconds.get(key, mean) for key, _ in self._left)
