"""Nested spans of time, each with the part of it that no inner span covers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_TRIES = 5000


@dataclass(slots=True, eq=False)
class Span:
    """One call of something.

    Attributes:
        name: what was called.
        track: on whose behalf: ``engine``, or the model that did it.
        outer: the span it lies in.
        detail: what else a trace shows, such as how many tokens a pass had.
        begin, end: in seconds, on the recorder's clock.
        inner: seconds covered by spans inside it.
    """

    name: str
    track: str
    outer: Span | None
    detail: dict[str, Any]
    begin: float = 0.0
    end: float = 0.0
    inner: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def own(self) -> float:
        """Seconds that no inner span covers. Over a span and all in it they add up to its own."""
        return self.seconds - self.inner

    def inside(self, name: str) -> Span | None:
        """The outermost span of that name that this one lies in or is."""
        found, span = None, self if self.name == name else self.outer
        while span is not None:
            found = span if span.name == name else found
            span = span.outer
        return found


@dataclass
class Recorder:
    """Collects spans in the order in which they end.

    Args:
        clock: seconds from any point on.
        wait: called at both ends of every span, where work goes on behind the program's back, as
            on a GPU; None if it does not.
    """

    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] | None = None
    spans: list[Span] = field(default_factory=list)
    _open: list[Span] = field(default_factory=list)

    def begin(self, name: str, track: str, detail: dict[str, Any] | None = None) -> None:
        """Opens a span inside the one that is open."""
        if self.wait is not None:
            self.wait()
        span = Span(name, track, self._open[-1] if self._open else None, detail or {})
        self._open.append(span)
        span.begin = self.clock()

    def end(self) -> None:
        """Closes the span opened last."""
        if self.wait is not None:
            self.wait()
        now = self.clock()
        span = self._open.pop()
        span.end = now
        if span.outer is not None:
            span.outer.inner += span.seconds
        self.spans.append(span)


def span_cost() -> float:
    """Seconds that recording one span takes here, without any waiting; the least of a few tries."""
    best = float("inf")
    for _ in range(3):
        recorder = Recorder()
        began = time.perf_counter()
        for _ in range(_TRIES):
            recorder.begin("span", "engine")
            recorder.end()
        best = min(best, (time.perf_counter() - began) / _TRIES)
    return best
