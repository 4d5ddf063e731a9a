"""Energy from samples of power, taken by a thread while a run goes on.

    sum        the MJSD paper's way (its appendix B): a sample each second, the first one dropped,
               the others added up, each standing for its second
    trapezoid  the integral over the samples' times, first and last sample at the ends of the run

The sum is coarse: it may miss up to one second at each end, and every peak between two samples.
"""

import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, Protocol

from outrider.lab.energy.errors import CounterError

Rule = Literal["sum", "trapezoid"]
PAPER_INTERVAL, FINE_INTERVAL = 1.0, 0.05


class Power(Protocol):
    """A source that tells the power drawn now."""

    @property
    def name(self) -> str: ...

    def watts(self) -> float:
        """The power now. Raises CounterError where it cannot be read."""
        ...


class Samples:
    """Samples of power, each with its time.

    Args:
        power: where they come from.
        clock: in seconds.
    """

    def __init__(self, power: Power, clock: Callable[[], float] = time.perf_counter) -> None:
        self._power, self._clock = power, clock
        self.taken: list[tuple[float, float]] = []
        self.error = ""

    def take(self) -> None:
        """Takes a sample; notes the first error, after which nothing more is taken."""
        if self.error:
            return
        try:
            watts = self._power.watts()
        except CounterError as error:
            self.error = str(error)
        else:
            self.taken.append((self._clock(), watts))

    def joules(self, rule: Rule, interval: float) -> float:
        """The energy of the samples; 0 where there are too few.

        Args:
            rule: how samples are added up.
            interval: seconds that a sample stands for, if they are summed.
        """
        if rule == "sum":
            return sum(watts for _, watts in self.taken[1:]) * interval
        return sum((t - s) * (v + w) / 2 for (s, v), (t, w) in pairwise(self.taken))


class PollingMeter:
    """Measures runs by samples of power.

    Args:
        power: the source.
        rule: how samples are added up.
        interval: seconds between samples; None takes the paper's second for ``sum``, and a
            twentieth for ``trapezoid``.
        clock: in seconds.
    """

    def __init__(
        self,
        power: Power,
        rule: Rule = "sum",
        interval: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._power, self._rule, self._clock = power, rule, clock
        default = PAPER_INTERVAL if rule == "sum" else FINE_INTERVAL
        self._interval = default if interval is None else interval
        self._samples = Samples(power, clock)
        self._thread: Repeating | None = None
        self._began = 0.0

    def begin(self) -> None:
        self._samples = Samples(self._power, self._clock)
        self._began = self._clock()
        self._samples.take()
        self._thread = Repeating(self._samples.take, self._interval)

    def end(self) -> Mapping[str, Any]:
        if self._thread is not None:
            self._thread.stop()
        if self._rule == "trapezoid":
            self._samples.take()
        seconds = self._clock() - self._began
        samples, error = self._samples, self._samples.error
        enough = len(samples.taken) > 1
        if not error and not enough:
            error = f"the run was shorter than {self._interval:g} s, the interval of the samples"
        return {
            "joules": None if error else samples.joules(self._rule, self._interval),
            "estimate": False,
            "source": f"{self._power.name} power, {self._rule} over {self._interval:g} s",
            "seconds": seconds,
            "samples": len(samples.taken),
            **({"error": error} if error else {}),
        }


class Repeating:
    """A thread that calls a function at an interval until it is stopped.

    Args:
        call: must not raise.
        interval: seconds.
    """

    def __init__(self, call: Callable[[], None], interval: float) -> None:
        self._call, self._interval = call, interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="outrider power")
        self._thread.start()

    def stop(self) -> None:
        """Stops it; no call is under way afterwards."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due += self._interval
            if self._stopped.wait(max(0.0, due - time.monotonic())):
                return
            self._call()
