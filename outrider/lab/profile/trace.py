"""Spans in the Chrome trace event format, which Perfetto and chrome://tracing open.

Complete events (``ph: X``) of the "Trace Event Format", times in microseconds, with metadata events
(``ph: M``) that name the tracks: one for the engine, one per model. The spans on a track nest.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.lab.profile.spans import Span

_PROCESS = 1


def trace_events(spans: Iterable[Span], names: dict[str, str]) -> dict[str, Any]:
    """The spans as a JSON document in the trace event format.

    Args:
        spans: in any order; the earliest begins at time 0.
        names: display name of each track, in the order in which the tracks are shown.
    """
    spans = sorted(spans, key=lambda span: span.begin)
    zero = spans[0].begin if spans else 0.0
    thread = {track: number for number, track in enumerate(names, 1)}
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "outrider"})]
    for track, number in thread.items():
        events.append(_metadata("thread_name", number, {"name": names[track]}))
        events.append(_metadata("thread_sort_index", number, {"sort_index": number}))
    for span in spans:
        begin = _nanoseconds(span.begin - zero)
        events.append(
            {
                "name": span.name,
                "cat": span.track,
                "ph": "X",
                "ts": begin / 1000,
                "dur": (_nanoseconds(span.end - zero) - begin) / 1000,
                "pid": _PROCESS,
                "tid": thread[span.track],
                "args": span.detail,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(spans: Iterable[Span], names: dict[str, str], path: Path) -> None:
    """Writes the trace of :func:`trace_events` to a file."""
    path.write_text(json.dumps(trace_events(spans, names)) + "\n", encoding="utf-8")


def _nanoseconds(seconds: float) -> int:
    """Whole nanoseconds. Rounding both ends alike keeps an inner span inside its outer one."""
    return round(1e9 * seconds)


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": thread, "args": args}
