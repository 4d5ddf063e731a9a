"""Energy counters around a run, with and without what the machine draws when idle."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from outrider.lab.energy.errors import CounterError
from outrider.lab.energy.polling import Repeating

IDLE_SECONDS = 5.0


class Counter(Protocol):
    """Energy counters of one kind.

    Attributes:
        name: of the kind.
        longest_interval: most seconds between two reads, lest the counter run through its range;
            None where that does not happen.
    """

    @property
    def name(self) -> str: ...
    @property
    def longest_interval(self) -> float | None: ...

    def read(self) -> Mapping[str, float]:
        """Joules by domain since the counters were opened. Raises CounterError where one has
        vanished."""
        ...


class CounterMeter:
    """Measures runs by energy counters.

    A counter that vanishes during a run leaves the run without joules and with the error; the
    counters are tried again in the next run.

    Args:
        counters: at least one. Their domains must not overlap.
        idle_watts: what the machine draws without the run; None where it is not known.
        clock: in seconds.
    """

    def __init__(
        self,
        counters: Sequence[Counter],
        idle_watts: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counters, self._clock = tuple(counters), clock
        self.idle_watts = idle_watts
        self._before: dict[str, float] = {}
        self._error = ""
        self._began = 0.0
        self._thread: Repeating | None = None

    def begin(self) -> None:
        self._error = ""
        self._before = self._read()
        intervals = [each.longest_interval for each in self._counters]
        shortest = min((each for each in intervals if each is not None), default=None)
        if shortest is not None:
            self._thread = Repeating(self._keep_up, shortest / 4)
        self._began = self._clock()

    def end(self) -> Mapping[str, Any]:
        seconds = self._clock() - self._began
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        after = self._read()
        about = {
            "estimate": False,
            "source": " and ".join(each.name for each in self._counters),
            "seconds": seconds,
            "idle_watts": self.idle_watts,
        }
        if self._error:
            return {"joules": None, "joules_above_idle": None, "error": self._error, **about}
        domains = {name: after[name] - self._before[name] for name in after}
        joules = math.fsum(domains.values())
        idle = None if self.idle_watts is None else joules - self.idle_watts * seconds
        return {"joules": joules, "joules_above_idle": idle, "domains": domains, **about}

    def _read(self) -> dict[str, float]:
        if self._error:
            return {}
        try:
            return {name: j for each in self._counters for name, j in each.read().items()}
        except CounterError as error:
            self._error = str(error)
            return {}

    def _keep_up(self) -> None:
        self._read()


def idle_watts(
    counters: Sequence[Counter],
    seconds: float = IDLE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """The mean power while nothing runs here; None where a counter fails.

    Args:
        counters: see :class:`CounterMeter`.
        seconds: how long to measure.
        sleep: waits for so many seconds.
        clock: in seconds.
    """
    meter = CounterMeter(counters, clock=clock)
    meter.begin()
    sleep(seconds)
    reading = meter.end()
    joules, passed = reading["joules"], reading["seconds"]
    return joules / passed if joules is not None and passed > 0 else None
