"""Seconds by the number of rows and the draft length, from rounds of some of them.

A cell that was never measured, or long ago, is read off a line in the number of tokens, fitted to
all cells, plus what the measured cells of the same number of rows deviate from it.

Legend: B rows, γ the draft length.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

HALF_LIFE = 512
"""Rounds after which a measurement has half its weight."""

MEMORY = 16.0
"""Most rounds that the mean of a cell stands for."""

ASSUMED_ROUNDS = 4.0
"""Rounds that a measurement from before the first request stands for."""

TRUST = 0.25
"""Weight of the fitted line beside a cell's own rounds."""

MOVED = 0.03
"""By what share a cell's mean moves before the tables are read again."""

TINY = 1e-12
"""Seconds that count as none."""

_REFIT = 16
_OUTLIER = 2.0
_LEAST = 0.25  # of the smallest mean, below which no extrapolated time lies


@dataclass(slots=True)
class Cell:
    """The mean seconds of some rounds.

    Attributes:
        mean: seconds.
        weight: how many rounds the mean stands for.
        measured: number of the last of these rounds.
        noted: the mean when the cell last counted as moved.
    """

    mean: float
    weight: float
    measured: int
    noted: float = 0.0

    def has_moved(self) -> bool:
        """Whether the mean moved so far that what was read before is out of date. It then counts as
        not moved."""
        if abs(self.mean - self.noted) <= MOVED * self.noted:
            return False
        self.noted = self.mean
        return True

    def weight_at(self, now: int) -> float:
        """The weight that is left: a stale cell has little."""
        return self.weight * 0.5 ** ((now - self.measured) / HALF_LIFE)

    def is_below(self, seconds: float, now: int) -> bool:
        """Whether the mean of several rounds is lower."""
        return seconds > self.mean and self.weight_at(now) > ASSUMED_ROUNDS / 2

    def add(self, seconds: float, now: int, num_rounds: int = 1) -> None:
        """Takes other rounds, fewer than ``MEMORY``, of so many seconds each. Rounds much slower
        than the others count as twice the mean, since something else delayed them; rounds much
        faster replace the others, since it was they that were delayed."""
        if seconds * _OUTLIER < self.mean:
            self.mean, self.weight = seconds, float(num_rounds)
        else:
            weight = min(self.weight_at(now), MEMORY - num_rounds)
            self.weight = weight + num_rounds
            more = min(seconds, _OUTLIER * self.mean) - self.mean
            self.mean += more * num_rounds / self.weight
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
        self._moves: dict[int, int] = {}
        self._line = 0.0, 0.0
        self._since_fit = _REFIT

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been measured."""
        return not self._cells

    def observe(
        self,
        rows: int,
        length: int,
        seconds: float,
        now: int,
        weight: float = 1.0,
        *,
        num_rounds: int = 1,
        at_most: bool = False,
    ) -> None:
        """Takes the seconds of a round, or of several that took as long. A single first one of a
        cell counts as twice what was expected at most: it may have loaded a program, and what looks
        so slow would not be tried again.

        Args:
            rows, length: B and γ.
            seconds: of each round.
            now: number of the last round.
            weight: how many rounds a first measurement stands for.
            num_rounds: how many rounds there were.
            at_most: the seconds are only a bound: more than a mean of several rounds says nothing.
        """
        cell = self._cells.get(rows, {}).get(length)
        if cell is None:
            if weight == 1.0 and self._cells:
                (expected,), _ = self.read(rows, [length], now)
                seconds = min(seconds, _OUTLIER * expected)
            cell = self._cells.setdefault(rows, {})[length] = Cell(seconds, weight, now)
            self._since_fit = _REFIT
        elif at_most and cell.is_below(seconds, now):
            cell.measured = now
        else:
            cell.add(seconds, now, num_rounds)
            self._since_fit += 1
        if cell.has_moved():
            self._moves[rows] = self._moves.get(rows, 0) + 1

    def confirm(self, rows: int, length: int, now: int) -> None:
        """Takes a round that says nothing new of its cell."""
        self._cells[rows][length].measured = now

    def moves(self, rows: int) -> int:
        """How often a cell of this many rows has moved: what is read stays the same, but for the
        line and the weights, as long as this number does."""
        return self._moves.get(rows, 0)

    def means(self) -> Iterator[tuple[int, int, float]]:
        """Rows, draft length and mean seconds of each cell."""
        for rows, cells in sorted(self._cells.items()):
            for length, cell in sorted(cells.items()):
                yield rows, length, cell.mean

    def mean(self, rows: int, length: int) -> float:
        """The mean of a cell; 0 if it was never measured."""
        cell = self._cells.get(rows, {}).get(length)
        return 0.0 if cell is None else cell.mean

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
        least = _LEAST * min(
            [cell.mean for cells in self._cells.values() for cell in cells.values()]
        )
        seconds = [
            max(least, max(0.0, level + slope * self._tokens(rows, length)) + excess)
            for length, excess in zip(lengths, self._excesses(rows, lengths, now), strict=True)
        ]
        weights = [known[n].weight_at(now) if n in known else TRUST for n in lengths]
        return seconds, weights

    def on_line(self, rows: int, length: int) -> float:
        """What the fitted line says of a cell; some must have been read."""
        level, slope = self._line
        return level + slope * self._tokens(rows, length)

    def _excesses(self, rows: int, lengths: Sequence[int], now: int) -> list[float]:
        """What the cells of so many rows are above the line, by draft length. Where none of them
        was measured, it lies between those of the next smaller and the next larger batch."""
        if rows in self._cells:
            return self._excesses_of(rows, lengths, now)
        sizes = sorted(self._cells)
        near = {sizes[max(0, bisect_left(sizes, rows) - 1)]}
        near.add(sizes[min(len(sizes) - 1, bisect_left(sizes, rows))])
        places = sorted(near)
        tables = [self._excesses_of(size, lengths, now) for size in places]
        return [interpolated(places, each, rows) for each in zip(*tables, strict=True)]

    def _excesses_of(self, rows: int, lengths: Sequence[int], now: int) -> list[float]:
        level, slope = self._line
        excess = {}
        for length, cell in sorted(self._cells[rows].items()):
            weight = cell.weight_at(now)
            above = cell.mean - level - slope * self._tokens(rows, length)
            excess[length] = above * weight / (weight + TRUST)
        measured, values = list(excess), list(excess.values())
        return [
            excess[length] if length in excess else interpolated(measured, values, length)
            for length in lengths
        ]

    def _fitted(self, now: int) -> tuple[float, float]:
        """Level and slope of the line that fits all cells, by least squares of relative errors. The
        slope is drawn towards the one that is assumed before anything is measured."""
        points = []
        for rows, cells in self._cells.items():
            for length, cell in cells.items():
                weight = cell.weight_at(now) / max(cell.mean, TINY) ** 2
                points.append((float(self._tokens(rows, length)), cell.mean, weight))
        total = sum(w for _, _, w in points)
        mean_x = sum(x * w for x, _, w in points) / total
        mean_y = sum(y * w for _, y, w in points) / total
        spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
        joint = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points)
        assumed = self._slope * mean_y / (1 + self._slope * mean_x)
        own = TRUST / max(mean_y, TINY) ** 2
        slope = max(0.0, (joint + own * assumed) / (spread + own))
        return mean_y - slope * mean_x, slope


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
