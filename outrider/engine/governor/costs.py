"""What a round costs: seconds by the number of rows and the draft length, measured on the running
engine.

A round of B rows with drafts of γ tokens takes

    γ d(B, γ) + v(B, γ)        d: a draft step; v: all the rest, mostly the target's forward pass

A forward pass is a rectangle, B times γ + 1 tokens, however long the drafts of the single rows are.
Both surfaces are filled from real rounds. A cell that was never measured, or long ago, is read off
a line in the number of tokens, fitted to all cells, plus what the measured cells of the same number
of rows deviate from it. Times do not decrease with γ (``monotone``, isotonic regression).

Legend: B rows, γ the draft length.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

HALF_LIFE = 512
"""Rounds after which a measurement has half its weight."""

MEMORY = 16.0
"""Most rounds that the mean of a cell stands for."""

TRUST = 0.25
"""Weight of the fitted line beside a cell's own rounds."""

_REFIT = 16
_REREAD = 8
_AS_USUAL = 2  # tokens that the first draft step reads without taking longer
_OUTLIER = 2.0
_TINY = 1e-12


@dataclass(slots=True)
class Cell:
    """The mean seconds of some rounds.

    Attributes:
        mean: seconds.
        weight: how many rounds the mean stands for.
        measured: number of the last of these rounds.
    """

    mean: float
    weight: float
    measured: int

    def weight_at(self, now: int) -> float:
        """The weight that is left: a stale cell has little."""
        return self.weight * 0.5 ** ((now - self.measured) / HALF_LIFE)

    def add(self, seconds: float, now: int) -> None:
        """Takes another round. A round much slower than the others counts as twice the mean, since
        something else delayed it; one much faster replaces them, since it was they that were
        delayed."""
        if seconds * _OUTLIER < self.mean:
            self.mean, self.weight = seconds, 1.0
        else:
            weight = min(self.weight_at(now), MEMORY - 1)
            self.mean += (min(seconds, _OUTLIER * self.mean) - self.mean) / (weight + 1)
            self.weight = weight + 1
        self.measured = now


class Surface:
    """Seconds by rows and draft length.

    Args:
        tokens: the number of tokens that the seconds of a cell mostly depend on.
        slope: what another token adds, relative to the seconds of a cell, before cells of different
            numbers of tokens are measured.
    """

    def __init__(self, tokens: Callable[[int, int], int], slope: float) -> None:
        self._tokens = tokens
        self._slope = slope
        self._cells: dict[int, dict[int, Cell]] = {}
        self._line = 0.0, 0.0
        self._since_fit = _REFIT

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self._cells

    def observe(self, rows: int, length: int, seconds: float, now: int) -> None:
        """Takes the seconds of a round; ``now`` is its number."""
        cells = self._cells.setdefault(rows, {})
        if length in cells:
            cells[length].add(seconds, now)
            self._since_fit += 1
        else:
            cells[length] = Cell(seconds, 1.0, now)
            self._since_fit = _REFIT

    def age(self, rows: int, length: int, now: int) -> int | None:
        """Rounds since a cell was measured; None if it never was."""
        cell = self._cells.get(rows, {}).get(length)
        return None if cell is None else now - cell.measured

    def read(self, rows: int, lengths: Sequence[int], now: int) -> tuple[list[float], list[float]]:
        """The seconds of each draft length, and how many rounds each of them stands for. At least
        one cell must have been measured."""
        if self._since_fit >= _REFIT:
            self._line, self._since_fit = self._fitted(now), 0
        level, slope = self._line
        known = self._cells.get(rows, {})
        measured = sorted(known)
        weight_of = {length: known[length].weight_at(now) for length in measured}
        excess = [
            (known[length].mean - level - slope * self._tokens(rows, length))
            * (weight_of[length] / (weight_of[length] + TRUST))
            for length in measured
        ]
        seconds = [
            max(0.0, level + slope * self._tokens(rows, length))
            + interpolated(measured, excess, length)
            for length in lengths
        ]
        return seconds, [weight_of.get(length, TRUST) for length in lengths]

    def _fitted(self, now: int) -> tuple[float, float]:
        """Level and slope of the line that fits all cells, by least squares of relative errors. The
        slope is drawn towards the one that is assumed before anything is measured."""
        points = []
        for rows, cells in self._cells.items():
            for length, cell in cells.items():
                weight = cell.weight_at(now) / max(cell.mean, _TINY) ** 2
                points.append((float(self._tokens(rows, length)), cell.mean, weight))
        total = sum(w for _, _, w in points)
        mean_x = sum(x * w for x, _, w in points) / total
        mean_y = sum(y * w for _, y, w in points) / total
        spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
        joint = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points)
        assumed = self._slope * mean_y / (1 + self._slope * mean_x)
        own = TRUST / max(mean_y, _TINY) ** 2
        slope = max(0.0, (joint + own * assumed) / (spread + own))
        return mean_y - slope * mean_x, slope


class RoundCosts:
    """The seconds of rounds, and of a draft model's catching up with the committed tokens.

    Args:
        draft_ratio: seconds of a draft step over those of a target pass, before any was measured.
    """

    VERIFY_SLOPE = 0.03
    CATCH_UP = 0.1

    def __init__(self, draft_ratio: float) -> None:
        self._ratio = draft_ratio
        self._step = Surface(lambda rows, length: rows, self.VERIFY_SLOPE)
        self._rest = Surface(lambda rows, length: rows * (length + 1), self.VERIFY_SLOPE)
        self._catch_up = self.CATCH_UP
        self._began = False
        self._curves: dict[tuple[int, Sequence[int]], tuple[int, list[float]]] = {}
        self.now = 0

    @property
    def is_empty(self) -> bool:
        """Whether no round has been measured."""
        return self._rest.is_empty

    def observe(
        self,
        rows: int,
        length: int,
        draft: float,
        total: float,
        behind: int = 0,
        width: int | None = None,
    ) -> None:
        """Takes a round's seconds. The first round of all also does what is done once, such as
        allocating memory, and is left out.

        Args:
            rows: B.
            length: γ, the longest draft that was asked for.
            draft: seconds in the draft model's forward passes.
            total: seconds of the round.
            behind: committed tokens that the draft model read first, of the row that lacked most.
            width: the longest draft that was verified, where other tokens than the drafter's made
                it longer; None for ``length``.
        """
        if not self._began:
            self._began = True
            return
        self.now += 1
        self._rest.observe(
            rows, length if width is None else width, max(total - draft, 0.0), self.now
        )
        if not length or not draft:
            return
        if behind > _AS_USUAL and not self._step.is_empty:
            step = self._steps(rows, [length])[0]
            if step > 0:
                extra = max(draft - step * length, 0.0) / (step * behind)
                self._catch_up += (min(extra, 1.0) - self._catch_up) / 4
        elif behind <= _AS_USUAL:
            self._step.observe(rows, length, draft / length, self.now)

    def age(self, rows: int, length: int) -> int | None:
        """Rounds since this many rows drafted so many tokens; None if they never did."""
        return self._rest.age(rows, length, self.now)

    def curve(self, rows: int, lengths: tuple[int, ...]) -> list[float]:
        """Seconds of a round by draft length; the lengths ascend. A round must have been measured.
        The last few rounds may be left out: each moves a mean of many rounds little."""
        made, curve = self._curves.get((rows, lengths), (-_REREAD, []))
        if self.now - made >= min(_REREAD, 1 + self.now // _REREAD):
            curve = self._curve(rows, lengths)
            self._curves[rows, lengths] = self.now, curve
        return curve

    def _curve(self, rows: int, lengths: tuple[int, ...]) -> list[float]:
        rest = monotone(*self._rest.read(rows, lengths, self.now))
        drafting = accumulate(map(mul, lengths, self._steps(rows, lengths)), max)
        return [v + d for v, d in zip(rest, drafting, strict=True)]

    def catch_up(self, rows: int, behind: int) -> float:
        """Seconds for a draft model to read so many committed tokens of each row."""
        return self._catch_up * behind * self._steps(rows, [1])[0] if behind else 0.0

    def _steps(self, rows: int, lengths: Sequence[int]) -> list[float]:
        """Seconds of a draft step, by draft length."""
        if self._step.is_empty:
            plain = self._rest.read(rows, [0], self.now)[0][0]
            return [self._ratio * plain] * len(lengths)
        return [max(0.0, step) for step in self._step.read(rows, lengths, self.now)[0]]


def interpolated(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """The value at a place, linearly between the known ones and constant beyond them; 0 if there
    are none. The places ascend."""
    if not places:
        return 0.0
    i = bisect_left(places, at)
    if i == 0:
        return values[0]
    if i == len(places):
        return values[-1]
    low, high = places[i - 1], places[i]
    share = (at - low) / (high - low)
    return (1 - share) * values[i - 1] + share * values[i]


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values, by weighted squares, that do not decrease: pool adjacent violators (Ayer
    et al., 1955)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            last, of_last, more = pools.pop()
            value = (last * of_last + value * weight) / (of_last + weight)
            weight, count = weight + of_last, count + more
        pools.append((value, weight, count))
    return [value for value, _, count in pools for _ in range(count)]
