"""The time of a round by the number of rows, the draft length and the width of the target's pass.

A round takes the target's pass and everything else, of which the drafting is the larger part:

    T(b, γ, w) = t(b, w) + r(b, γ)

t is measured alone, over passes of b rows and w tokens each. r is what is left of the time of real
rounds, measured at few γ (at γ = 0 it is that of plain decoding), and linear in between: a draft
model runs once per token. So the prediction is exact where rounds were timed.

    c   how much longer a round gets per drafted token, apart from the target's pass, over the time
        of a plain step
    β   t(b, γ + 1) / t(b, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.lab.analysis.pass_times import interpolated


@dataclass
class PassTable:
    """Seconds of the target's passes.

    Attributes:
        seconds: by rows and width.
    """

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)

    def time(self, num_rows: float, width: float) -> float:
        """Seconds of a pass, interpolated between the measured ones; a batch larger or smaller than
        all measured ones is extrapolated in proportion, but not below zero."""
        by_rows = {rows: self._at(rows, width) for rows in {rows for rows, _ in self.seconds}}
        return max(0.0, interpolated(by_rows, num_rows))

    def beta(self, num_rows: int, width: int) -> float:
        """β of a pass over ``width`` tokens of each row."""
        return self.time(num_rows, width) / self.time(num_rows, 1)

    def _at(self, rows: int, width: float) -> float:
        of_rows = {w: seconds for (b, w), seconds in self.seconds.items() if b == rows}
        return interpolated(of_rows, width)


@dataclass
class RestTable:
    """Seconds of a source's rounds apart from the target's pass.

    Attributes:
        seconds: by rows and draft length; those of plain decoding have length 0.
        outside: seconds of a batch outside of its rounds, by rows.
    """

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    outside: dict[int, float] = field(default_factory=dict)

    @property
    def measured_rows(self) -> set[int]:
        """The numbers of rows at which rounds were timed."""
        return {rows for rows, _ in self.seconds}

    def time(self, num_rows: float, length: float, scale: Mapping[int, float]) -> float:
        """Seconds apart from the target's pass.

        Args:
            num_rows: rows that run.
            length: γ.
            scale: seconds of a plain round by rows. Where no round of the source was timed with so
                many rows, its time is in proportion to these.
        """
        by_rows = {rows: self._at(rows, length) for rows in self.measured_rows}
        for rows in scale.keys() - by_rows.keys():
            near = min(self.measured_rows, key=lambda each: abs(each - rows))
            by_rows[rows] = by_rows[near] * scale[rows] / scale[near] if near in scale else 0.0
        return interpolated(by_rows, num_rows)

    def per_token(self, num_rows: int) -> float:
        """How much longer a round gets per drafted token."""
        known = sorted(length for rows, length in self.seconds if rows == num_rows)
        if len(known) < 2:
            return 0.0
        first, last = known[0], known[-1]
        rise = self.seconds[num_rows, last] - self.seconds[num_rows, first]
        return max(0.0, rise / (last - first))

    def outside_of(self, num_rows: int) -> float:
        """Seconds of a batch outside of its rounds."""
        return max(0.0, interpolated(self.outside, num_rows)) if self.outside else 0.0

    def _at(self, rows: int, length: float) -> float:
        of_rows = {n: seconds for (b, n), seconds in self.seconds.items() if b == rows}
        return interpolated(of_rows, length)
