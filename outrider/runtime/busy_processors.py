"""How many threads compute where other processes want the processors, too.

All threads of a parallel region wait for the last one. Where one of them has to wait for a
processor, the others spin until it has had its turn, region after region: with another process at
work on one of two processors, a small model ran at 3 to 7 tokens per second on both of them, and at
260 to 340 on one (AMD EPYC; Linux, which shares processors evenly between sessions, whatever their
priority). So threads give way as long as they are seen to wait for longer than one thread fewer
would cost.

Linux counts how long each thread has run, and how long it has waited for a processor. Elsewhere
nothing is seen, and all threads compute. So do all where outputs may depend on their number
(``Engine``).
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

from outrider.runtime.host_processors import num_processors
from outrider.runtime.openmp import at_most_threads

WINDOW = 0.05
"""Seconds after which it is looked again."""

_MOST_WAITING, _MOST_OF_ONE = 0.1, 0.4
"""Share of the time that all threads together may wait: the first, or the second divided by their
number if that is more. On two threads they compute up to 1.3 times as fast as on one."""

_HEED = 0.25  # weight of a window in the mean
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until one more thread is tried
_TRIAL = 5  # windows in which it is seen whether that has failed
_DEAREST = 0.01  # most time that looking may take
_COMPUTES = 0.5  # share of the time that a thread runs or waits if it computes
_TASKS = Path("/proc/self/task")


class ThreadTimes(NamedTuple):
    """What is counted of a thread.

    Attributes:
        ran: seconds on a processor.
        waited: seconds in which it waited for one.
    """

    ran: float
    waited: float


Times = Mapping[str, ThreadTimes]
"""Of the threads of this process."""


def thread_times() -> Times | None:
    """The times of all threads of this process; None where nobody counts them."""
    try:
        stats = {each.name: Path(each, "schedstat").read_bytes() for each in _TASKS.iterdir()}
        times = ((name, stat.split()) for name, stat in stats.items())
        return {name: ThreadTimes(int(n[0]) / 1e9, int(n[1]) / 1e9) for name, n in times}
    except (OSError, ValueError, IndexError):  # no Linux; or a thread has just ended
        return None


def waiting(before: Times, after: Times, seconds: float) -> float | None:
    """How long the threads that compute have waited, all together, as a share of the time; None
    where none does, as between two requests. Others, such as one that reads requests, wait without
    delaying them."""
    shares = (
        ((now.ran - then.ran) / seconds, (now.waited - then.waited) / seconds)
        for name, now in after.items()
        if (then := before.get(name)) is not None
    )
    computing = [waited for ran, waited in shares if ran + waited > _COMPUTES]
    return sum(computing) if computing else None


class BusyProcessors:
    """Chooses the number of threads, step by step.

    While threads wait, on average, for longer than one of them is worth, there is one fewer of them
    after the other. After a second, one more is tried; each time that this fails, twice as long
    goes by until the next try.

    Args:
        clock: seconds since some moment.
        times: see :func:`thread_times`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        times: Callable[[], Times | None] = thread_times,
    ) -> None:
        self._clock, self._times = clock, times
        self._fewer = 0
        self._waiting = 0.0  # the mean of the windows since the number of threads has changed
        self._pause, self._try_at = _FIRST_PAUSE, 0.0
        self._trial = 0  # windows that are left of it
        self._began, self._before = clock(), times()
        self._window = WINDOW
        self._lock = Lock()

    def num_threads(self, most: int) -> int:
        """Threads for the next step; at most ``most``, and one at least."""
        if most <= 1:
            return 1
        now = self._clock()
        if now - self._began >= self._window:
            with self._lock:
                self._look(now, most)
        return max(1, most - self._fewer)

    def _look(self, now: float, most: int) -> None:
        seconds, before = now - self._began, self._before
        if seconds < self._window:  # another thread has just looked
            return
        self._before = after = self._times()
        self._began = self._clock()
        self._window = max(WINDOW, (self._began - now) / _DEAREST)
        if before is None or after is None:
            return
        share = waiting(before, after, seconds)
        if share is None:
            return
        self._waiting += _HEED * (share - self._waiting)
        if self._waiting > max(_MOST_WAITING, _MOST_OF_ONE / max(1, most - self._fewer)):
            self._give_way(now, most)
        elif self._fewer and now >= self._try_at:
            self._fewer -= 1
            self._waiting, self._trial = 0.0, _TRIAL
        else:
            self._trial = max(0, self._trial - 1)

    def _give_way(self, now: float, most: int) -> None:
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._trial else _FIRST_PAUSE
        self._fewer = min(self._fewer + 1, most - 1)
        self._waiting, self._trial = 0.0, 0
        self._try_at = now + self._pause


_PROCESSORS = BusyProcessors()
"""Those of this process."""


@contextmanager
def sharing_processors(num_others: int = 0, *, looks: bool = True) -> Iterator[None]:
    """Within it, the calling thread computes with as many threads as find processors; called before
    each step.

    Args:
        num_others: processes that are known to compute on this machine.
        looks: whether to look for others.
    """
    most = torch.get_num_threads()
    if num_others:
        most = min(most, num_processors() - num_others)
    with at_most_threads(_PROCESSORS.num_threads(most) if looks else most):
        yield
