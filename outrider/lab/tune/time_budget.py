"""The time that tuning may take, and what it leaves out to keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class TimeBudget:
    """Counts the seconds since the tuning began.

    Attributes:
        seconds: that all of the tuning may take.
        clock: seconds since some moment.
        began: when the tuning began, by that clock; None is now.
        left_out: what there was no time for, in the order in which it was left out.
    """

    seconds: float
    clock: Callable[[], float]
    began: float | None = None
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock() if self.began is None else self.began

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain; below 0 once the time is over."""
        return self.seconds - self.spent

    def left_until(self, share: float) -> float:
        """Seconds that remain until a share of the whole time is over."""
        return share * self.seconds - self.spent

    def allows(self, what: str, seconds: float, until: float = 1.0) -> bool:
        """Whether a piece of work fits; notes it as left out where it does not.

        Args:
            what: the work, in words.
            seconds: that it will take, by an estimate from what was measured.
            until: the share of the whole time by which it must have ended.
        """
        if self.spent + seconds <= until * self.seconds:
            return True
        self.left_out.append(what)
        return False
