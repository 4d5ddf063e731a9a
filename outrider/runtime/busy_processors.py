"""How many threads compute where other processes want the processors, too.

All threads of a parallel region wait for the last one. Where one of them has to wait for a
processor, the others spin until it has had its turn, region after region: with another process at
work on one of two processors, a small model ran at 3 to 7 tokens per second on both of them, and at
260 to 340 on one (AMD EPYC; Linux, which shares processors evenly between sessions, whatever their
priority). So threads give way as long as they are seen to wait.

Linux counts how long each thread has waited for a processor. Elsewhere nothing is seen, and all
threads compute. So do all where outputs may depend on their number (``Engine``).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch

from outrider.runtime.host_processors import num_processors
from outrider.runtime.openmp import at_most_threads

WINDOW = 0.05
"""Seconds after which it is looked again."""

_MOST_WAITING = 0.1  # seconds that all threads together wait in a second
_LONGEST_WINDOW = 0.5  # seconds; a longer one had a pause in it, and says nothing
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds until one more thread is tried
_DEAREST = 0.01  # most time that looking may take
_TASKS = Path("/proc/self/task")


def waited_seconds() -> float | None:
    """How long all threads of this process have waited for a processor; None where nobody counts
    it."""
    try:
        stats = [Path(each, "schedstat").read_bytes() for each in _TASKS.iterdir()]
        return sum(int(each.split()[1]) for each in stats) / 1e9
    except (OSError, ValueError, IndexError):  # no Linux; or a thread has just ended
        return None


class BusyProcessors:
    """Chooses the number of threads, step by step.

    While threads wait for more than a tenth of the time, there is one fewer of them every 50 ms.
    After a second, one more is tried; each time that this fails, twice as long goes by until the
    next try.

    Args:
        clock: seconds since some moment.
        waited: see :func:`waited_seconds`.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float | None] = waited_seconds,
    ) -> None:
        self._clock, self._waited = clock, waited
        self._fewer = 0
        self._pause, self._try_at = _FIRST_PAUSE, 0.0
        self._tried = False
        self._began, self._before = clock(), waited()
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
        self._before = waited = self._waited()
        self._began = self._clock()
        self._window = max(WINDOW, (self._began - now) / _DEAREST)
        if before is None or waited is None or seconds > max(_LONGEST_WINDOW, 2 * self._window):
            return
        if waited - before > _MOST_WAITING * seconds:
            self._give_way(now, most)
        elif self._fewer and now >= self._try_at:
            self._fewer -= 1
            self._tried = True
        else:
            self._tried = False

    def _give_way(self, now: float, most: int) -> None:
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if self._tried else _FIRST_PAUSE
        self._fewer = min(self._fewer + 1, most - 1)
        self._try_at, self._tried = now + self._pause, False


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
