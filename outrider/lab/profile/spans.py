"""Nested time spans, each with its own time: the part that no inner span covers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SPANS = 5000  # per measurement of the cost


@dataclass(slots=True, eq=False)
class Span:
    """The time of one call.

    Attributes:
        name: of the call.
        track: ``engine``, or the model that ran it.
        outer: the span that contains it; None at the outermost level.
        detail: further numbers for the trace, such as the tokens of a forward pass.
        begin, end: in seconds, on the recorder's clock.
        inner: seconds covered by spans directly inside it.
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
        """The whole time of the call."""
        return self.end - self.begin

    @property
    def own(self) -> float:
        """Seconds that no inner span covers.

        The own times of a span and of all spans inside it add up to its ``seconds``.
        """
        return self.seconds - self.inner

    def inside(self, name: str) -> Span | None:
        """The outermost span of that name among this span and those that contain it."""
        found, span = None, self if self.name == name else self.outer
        while span is not None:
            found = span if span.name == name else found
            span = span.outer
        return found


@dataclass
class SpanRecorder:
    """Collects spans in the order in which they end.

    Args:
        clock: seconds since an arbitrary point.
        wait: called at both ends of every span to wait for asynchronous work, as on a GPU; None
            if there is none.
    """

    clock: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] | None = None
    spans: list[Span] = field(default_factory=list)
    _open: list[Span] = field(default_factory=list)

    def begin(self, name: str, track: str, detail: dict[str, Any] | None = None) -> None:
        """Opens a span inside the current one."""
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
    """Seconds that recording one span takes on this machine, the smallest of three measurements."""
    best = float("inf")
    for _ in range(3):
        recorder = SpanRecorder()
        began = time.perf_counter()
        for _ in range(_SPANS):
            recorder.begin("span", "engine")
            recorder.end()
        best = min(best, (time.perf_counter() - began) / _SPANS)
    return best
