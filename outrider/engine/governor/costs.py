"""What a round costs: seconds by the number of rows and the draft length, measured on the running
engine.

A round of B rows with drafts of γ tokens takes

    γ d(B, γ) + v(B, γ)        d: a draft step; v: all the rest, mostly the target's forward pass

A forward pass is a rectangle, B times γ + 1 tokens, however long the drafts of the single rows are.
Both surfaces are filled from real rounds. A cell that was never measured, or long ago, is read off
a line in the number of tokens, fitted to all cells, plus what the measured cells of the same number
of rows deviate from it. Times do not decrease with γ (``monotone``, isotonic regression). What
slows rounds of all lengths alike is followed apart (``pace.py``). While rounds of one cell alone
run, nothing tells it from what slows the cell: after some of them only the pace learns. Otherwise
a machine that becomes faster while nothing is drafted would make drafts look slow.

Legend: B rows, γ the draft length.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from statistics import median_low

from outrider.engine.governor.catch_up import ASSUMED, CatchUp
from outrider.engine.governor.pace import Pace

HALF_LIFE = 512
"""Rounds after which a measurement has half its weight."""

MEMORY = 16.0
"""Most rounds that the mean of a cell stands for."""

ASSUMED_ROUNDS = 4.0
"""Rounds that a measurement from before the first request stands for."""

TRUST = 0.25
"""Weight of the fitted line beside a cell's own rounds."""

MOST_TOGETHER = 4
"""Most rounds that consecutive ones without drafts count as."""

ALONE = 8
"""Rounds of one cell in a row after which only the pace learns from more of them."""

MOVED = 0.03
"""By what share a cell's mean moves before the tables are read again."""

_REFIT = 16
_REREAD = 64
_AS_USUAL = 2  # tokens that the first draft step reads without taking longer
_OUTLIER = 2.0
_LEAST = 0.25  # of the smallest mean, below which no extrapolated time lies
_TINY = 1e-12


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
    STEP_SLOPE = 0.003  # low: reading that looks dear is not tried, so nothing corrects it

    def __init__(self, draft_ratio: float) -> None:
        self._ratio = draft_ratio
        self._step = Surface(lambda rows, length: rows, self.STEP_SLOPE)
        self._rest = Surface(lambda rows, length: rows * (length + 1), self.VERIFY_SLOPE)
        self._catch_up = CatchUp()
        self._began = self._prepared = False
        self._curves: dict[tuple[int, Sequence[int]], tuple[int, int, list[float]]] = {}
        self._single_step = -_REREAD, 0.0
        self._pace = Pace()
        self._kind: tuple[int, int, int] | None = None
        self._alone = 0
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
        *,
        changes: bool = False,
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
            changes: whether the round before drafted nothing and this one did, or the other way
                round. The processor's caches then hold what the other kind of round needs, so this
                one takes longer than the next ones will.
        """
        if not self._began:
            self._began = True
            return
        self.now += 1
        width = length if width is None else width
        if behind <= _AS_USUAL and not changes:
            self._follow(rows, length, width, total)
        alone, pace = self._runs_alone(rows, length, width, 1), self._pace.now
        draft, total = draft / pace, total / pace
        if alone:
            self._rest.confirm(rows, width, self.now)
        else:
            self._rest.observe(rows, width, max(total - draft, 0.0), self.now, at_most=changes)
        if not length or not draft:
            return
        if behind > _AS_USUAL:
            drafting = length * self._steps(rows, [length])[0]
            self.observe_reading(rows, behind, max(draft - drafting, 0.0) * pace)
        elif alone:
            self._step.confirm(rows, length, self.now)
        else:
            self._step.observe(rows, length, draft / length, self.now, at_most=changes)

    def observe_plain(self, rows: int, totals: Sequence[float]) -> None:
        """Takes rounds without drafts, by their median, since a single one may have been delayed.
        Many weigh as ``MOST_TOGETHER`` do: whatever else keeps the machine busy slows them all.

        Args:
            rows: B.
            totals: seconds of each, of consecutive ones.
        """
        if not self._began:
            self._began = True
            totals = totals[1:]
        if totals:
            self.now += len(totals)
            seconds = median_low(totals)
            num_rounds = min(len(totals), MOST_TOGETHER)
            for _ in range(num_rounds):
                self._follow(rows, 0, 0, seconds)
            if self._runs_alone(rows, 0, 0, len(totals)):
                self._rest.confirm(rows, 0, self.now)
                return
            self._rest.observe(rows, 0, seconds / self._pace.now, self.now, num_rounds=num_rounds)

    def _runs_alone(self, rows: int, length: int, width: int, num_rounds: int) -> bool:
        """Counts rounds of a cell in a row. Whether there are so many, or none of others since the
        times of all were assumed, that they only tell the pace; a cell that was never measured
        always learns."""
        kind = rows, length, width
        if kind != self._kind:
            self._alone = ALONE if self._kind is None and self._prepared else 0
            self._kind = kind
        self._alone += num_rounds
        is_known = self._rest.mean(rows, width) and (not length or self._step.mean(rows, length))
        return self._alone > ALONE and bool(is_known)

    def _follow(self, rows: int, length: int, width: int, total: float) -> None:
        """Lets the pace follow a round, as far as such rounds were measured before."""
        rest = self._rest.mean(rows, width)
        draft = length * self._step.mean(rows, length)
        if rest and (draft or not length):
            self._pace.follow(total, rest + draft)

    def observe_reading(self, rows: int, behind: int, seconds: float) -> None:
        """Takes the seconds in which a draft model read committed tokens that it lacked. A round
        must have been measured."""
        if not self._rest.is_empty and (step := self._steps(1, [1])[0]) > 0:
            self._catch_up.observe(rows * behind, seconds / self._pace.now / step)

    def age(self, rows: int, length: int) -> int | None:
        """Rounds since this many rows drafted so many tokens; None if they never did."""
        return self._rest.age(rows, length, self.now)

    def moves(self, rows: int) -> int:
        """How often the times of so many rows have moved; see :meth:`Surface.moves`."""
        return self._rest.moves(rows) + self._step.moves(rows)

    def curve(self, rows: int, lengths: tuple[int, ...]) -> list[float]:
        """Seconds of a round by draft length; the lengths ascend. A round must have been measured.
        They are read anew where they have moved, and now and then, since weights fade."""
        made, moves, curve = self._curves.get((rows, lengths), (-_REREAD, -1, []))
        if moves != self.moves(rows) or self.now - made >= _REREAD:
            curve = self._curve(rows, lengths)
            self._curves[rows, lengths] = self.now, self.moves(rows), curve
        return [seconds * self._pace.now for seconds in curve]

    def assume(self, rows: int, length: int, draft: float, total: float) -> None:
        """Takes the seconds of a round that were measured before the first request, or by another
        process; as :meth:`observe`."""
        self._began = self._prepared = True
        self._rest.observe(rows, length, max(total - draft, 0.0), self.now, ASSUMED_ROUNDS)
        if length and draft:
            self._step.observe(rows, length, draft / length, self.now, ASSUMED_ROUNDS)

    @property
    def is_prepared(self) -> bool:
        """Whether rounds were measured before the first request."""
        return self._prepared

    def cells(self) -> Iterable[tuple[int, int, float, float]]:
        """Rows, draft length, seconds of drafting and of the whole round, of all measured cells."""
        steps = {(rows, length): step for rows, length, step in self._step.means()}
        for rows, length, rest in self._rest.means():
            draft = steps.get((rows, length), 0.0) * length
            yield rows, length, draft, rest + draft

    def _curve(self, rows: int, lengths: tuple[int, ...]) -> list[float]:
        rest = monotone(*self._rest.read(rows, lengths, self.now))
        drafting = accumulate(map(mul, lengths, self._steps(rows, lengths)), max)
        return [max(v + d, _TINY) for v, d in zip(rest, drafting, strict=True)]

    def catch_up(self, rows: int, behind: int) -> float:
        """Seconds for a draft model to read so many committed tokens of each row."""
        if not behind:
            return 0.0
        made, step = self._single_step
        if self.now - made >= _REREAD:
            step = self._steps(1, [1])[0]
            self._single_step = self.now, step
            if step and not self._step.is_empty:
                self._catch_up.assume(self._step.on_line(ASSUMED, 1) / step)
        return self._catch_up.steps(rows * behind) * step * self._pace.now

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
