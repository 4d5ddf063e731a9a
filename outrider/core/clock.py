"""Measures time spent on a device without synchronising in the middle of a round."""

import time
from threading import local
from types import TracebackType

import torch


class Stopwatch(local):
    """Adds up the time of ``with`` blocks. On a GPU it records events and reads them later.

    Each thread has its own total, of the blocks that it ran itself.

    Args:
        device: where the timed work runs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._began = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._cuda:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        else:
            self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def seconds(self) -> float:
        """Total so far. On a GPU, waits for the last of these blocks."""
        if self._events:
            self._events[-1][1].synchronize()
        for begin, end in self._events:
            self._seconds += begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
