"""What a round costs: seconds by the number of rows and the draft length, measured on the running
engine.

A round of B rows with drafts of γ tokens takes

    γ d(B, γ) + v(B, γ)        d: a draft step; v: all the rest, mostly the target's forward pass

A forward pass is a rectangle, B times γ + 1 tokens, however long the drafts of the single rows are.
Both surfaces are filled from real rounds (``surface.py``). Times do not decrease with γ
(``monotone``, isotonic regression). What slows rounds of all lengths alike is followed apart
(``pace.py``). While only rounds of one cell run, nothing tells what slows the cell from what slows
the machine, so after some of them only the pace learns. If the cell learned, too, drafts would look
slow on a machine that has become faster while nothing was drafted. After all rows have been
replaced by others, whose contexts may be longer or shorter, only the pace learns until a second
length runs.

Legend: B rows, γ the draft length.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from statistics import median_low

from outrider.engine.governor.catch_up import ASSUMED, CatchUp
from outrider.engine.governor.pace import Pace
from outrider.engine.governor.surface import ASSUMED_ROUNDS, TINY, Surface

MOST_TOGETHER = 4
"""Most rounds that consecutive ones without drafts count as."""

ALONE = 8
"""Consecutive rounds of one cell after which only the pace learns from more of them."""

_REREAD = 64
_AS_USUAL = 2  # tokens that the first draft step reads without taking longer


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
        self._alone, self._is_pace_known = 0, True
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
        tells_pace = behind <= _AS_USUAL and not changes
        if tells_pace:
            self._follow(rows, length, width, total)
        is_alone = self._runs_alone(rows, length, width, 1) and tells_pace
        pace = self._pace.now
        draft, total = draft / pace, total / pace
        if is_alone:
            self._rest.confirm(rows, width, self.now)
        else:
            self._rest.observe(rows, width, max(total - draft, 0.0), self.now, at_most=changes)
        if not length or not draft:
            return
        if behind > _AS_USUAL:
            drafting = length * self._steps(rows, [length])[0]
            self.observe_reading(rows, behind, max(draft - drafting, 0.0) * pace)
        elif is_alone:
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
            else:
                each = seconds / self._pace.now
                self._rest.observe(rows, 0, each, self.now, num_rounds=num_rounds)

    def _runs_alone(self, rows: int, length: int, width: int, num_rounds: int) -> bool:
        """Counts consecutive rounds of a cell, and says whether only the pace learns from the last
        ones: there were more than ``ALONE``, or no others since times were assumed or all rows
        were replaced."""
        kind = rows, length, width
        if kind != self._kind:
            self._alone = 0 if self._is_pace_known else ALONE
            self._kind, self._is_pace_known = kind, True
        self._alone += num_rounds
        return self._alone > ALONE and self._expected(rows, length, width) > 0

    def change_rows(self) -> None:
        """The next rounds have none of the rows of those before."""
        self._kind, self._is_pace_known = None, False
        self._pace.change_rows()

    def _follow(self, rows: int, length: int, width: int, total: float) -> None:
        """Lets the pace follow a round, as far as such rounds were measured before."""
        if expected := self._expected(rows, length, width):
            self._pace.follow(total, expected)

    def _expected(self, rows: int, length: int, width: int) -> float:
        """The mean seconds of such rounds at a pace of 1; 0 if none was measured."""
        rest = self._rest.mean(rows, width)
        draft = length * self._step.mean(rows, length)
        return rest + draft if rest and (draft or not length) else 0.0

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
        self._is_pace_known = False
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
        return [max(v + d, TINY) for v, d in zip(rest, drafting, strict=True)]

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
