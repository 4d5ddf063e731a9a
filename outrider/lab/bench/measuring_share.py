"""The time that measuring takes, as a share of the time that is measured.

Inside the time of a batch, a benchmark reads the clock once per round, and notes when the round of
each request ended. What one such note takes is measured before the run, with the run's own clock,
as the median of some batches of notes. Meters are read outside of the time of a batch; what a meter
runs beside it, such as a thread that polls, is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from outrider.lab.bench.measure import Clock, Times
from outrider.lab.bench.record import Repeat

MOST = 0.01
"""The share that a benchmark may take."""
_BATCHES, _NOTES = 9, 200


def seconds_per_note(clock: Clock) -> float:
    """Seconds to read the clock and to note the end of a round."""

    def once() -> float:
        times = Times(1)
        began = clock()
        for length in range(_NOTES):
            times.note(0, clock(), length)
        return (clock() - began) / _NOTES

    return statistics.median(once() for _ in range(_BATCHES))


def measuring_share(repeats: Sequence[Repeat], seconds_per_note: float) -> float:
    """The share of a cell's time. Every request's round counts as a note with a clock of its own,
    which is too many where requests share a batch; and each batch as two more."""
    batches = [batch for repeat in repeats for batch in repeat.batches]
    notes = sum(2 + sum(len(each.round_seconds) for each in batch.requests) for batch in batches)
    seconds = sum(batch.seconds for batch in batches)
    return notes * seconds_per_note / seconds if seconds else 0.0
