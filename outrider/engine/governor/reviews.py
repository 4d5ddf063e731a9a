"""Reviews: a draft model that has fallen behind is compared with what the target emitted meanwhile.

After rounds without drafts a draft model lacks the tokens that they emitted. It has to read them
before it can draft, and one forward pass over n of them gives its distributions q_i before each.
With x_i drawn from the target's p_i,

    E[min(1, q_i(x_i) / p_i(x_i))] = sum_x min(p_i(x), q_i(x))

which is the probability that a token drafted there would have been accepted, by rejection sampling
and as the first one by block verification. At temperature 0 it is whether x_i is the argmax of q_i.
So a review yields n labels of acceptance for a single pass of the draft model, where a probe yields
one for a pass over what it lacks, a draft, and a wider pass of the target. Where the draft model
lacks more than ``REVIEW_WIDTH`` tokens, it reads the newest ones alone and lacks the others still:
a look must not become dearer by waiting for it, else there is none.

Reviews look at committed tokens alone and choose for later rounds, so they bias no output. They
may take 1 % of the time, and 5 % of what drafts have saved (``Governor.review_credit``). Where half
of the rows have begun or ceased to repeat themselves, a review is due as soon as the credit pays
for half of it, unless such rows accept next to nothing, or would gain little by accepting
everything. Otherwise some credit is left for such a moment, and reviews that take longer than a
round are seldom: at their price, no schedule finds a change soon. So a review is also due just
before it would take longer than a round. Else it would recede where each round makes it dearer by
more than its share of a round.
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider.core import REVIEW_WIDTH
from outrider.engine.governor.allocation import Option
from outrider.engine.governor.governor import REVIEW_SHARE, Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory, have_changed

MOST_REVIEWED = 8
"""Most tokens of each row that are compared."""

_LEAST_AGE = 6.0  # rounds
_LEAST_LABELS = 6
_EARNED = 0.5
_KEPT = {True: 1.0, False: 0.2}  # reviews whose credit is left for rows that change, if greedy
_AT_MOST = 4.0  # times the share that reviews earn, where credit was saved
_DEAR_SHARE = 0.004  # of the time, by reviews that take longer than a round
_HOPELESS = 4.0  # odds against acceptance
_MUCH = 1.5  # times the tokens of rounds without drafts
_LEAST_COST = 0.02


class Reviews:
    """The reviews of one running batch.

    Args:
        governor: what the engine has learned.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._cost = 0.0

    def begin(self, best: Option, rows: Sequence[RowMemory], greedy: bool) -> Option:
        """The option of drafting nothing, with a review that is due; arguments as of
        :meth:`wait`."""
        self._cost = self._cost_of(best, rows, greedy)
        return replace(best, reviews=True)

    def wait(self, best: Option, rows: Sequence[RowMemory], greedy: bool, reviewable: int) -> float:
        """Rounds until a review is due and the credit pays for it, as far as it is known now. Not
        above 0 where it is due. Credit that was saved up lets reviews follow each other faster.

        Args:
            best: the option of drafting nothing.
            rows: what is remembered of the rows.
            greedy: whether all rows are.
            reviewable: tokens of each row that would be compared.
        """
        if best.believed is None:
            return float("inf")
        governor, cost = self._governor, self._cost_of(best, rows, greedy)
        age = governor.now - governor.compared[greedy]
        wait, kept = _LEAST_AGE - age, 0.0
        if not self._is_promising(rows, greedy):
            share = _AT_MOST * REVIEW_SHARE if cost < 1 else _DEAR_SHARE
            left = self._rounds_until_dear(cost, best, rows, greedy)
            wait, kept = max(wait, min(cost / share - age, left)), _KEPT[greedy]
        return max(
            _LEAST_LABELS / len(rows) - reviewable,
            wait,
            ((_EARNED + kept) * cost - governor.review_credit) / REVIEW_SHARE,
        )

    def _rounds_until_dear(
        self, cost: float, best: Option, rows: Sequence[RowMemory], greedy: bool
    ) -> float:
        """Rounds for which a review of this cost may still wait if it is not to take longer than a
        round. Infinite if it does already, or never will."""
        growth = self._cost_of(best, rows, greedy, later=1) - cost
        most = self._cost_of(best, rows, greedy, later=REVIEW_WIDTH)
        return (1 - cost) / growth - 1 if growth > 0 and cost < 1 <= most else float("inf")

    def _is_promising(self, rows: Sequence[RowMemory], greedy: bool) -> bool:
        """Whether the rows have changed, are now such as sometimes accept, and would gain much if
        they accepted everything."""
        if not have_changed(rows):
            return False
        governor, lengths = self._governor, self._governor.sources.lengths
        seconds = governor.costs(greedy, 0).curve(len(rows), lengths)
        most = max((1 + n) / each for n, each in zip(lengths, seconds, strict=True))
        odds = min([governor.rates(kind, 0).odds(1)[0] for kind in {row.kind for row in rows}])
        return odds < _HOPELESS and most * seconds[0] > _MUCH

    def _cost_of(
        self, best: Option, rows: Sequence[RowMemory], greedy: bool, later: int = 0
    ) -> float:
        """Rounds that a review would take after so many more rounds."""
        assert best.believed is not None
        governor = self._governor
        num_read = min(governor.behind(0, rows) + later, REVIEW_WIDTH)
        reading = governor.costs(greedy, 0).catch_up(len(rows), num_read)
        return max(reading / best.believed.seconds, _LEAST_COST)

    def pay(self, asked: Asked, seconds: float) -> None:
        """Charges a review with the rounds that it took besides its own, whose seconds are given,
        but no more than twice what was expected, since something else may have delayed it."""
        assert asked.believed is not None
        spent = min(seconds / asked.believed.seconds - 1, 2 * self._cost)
        self._governor.review_credit -= max(spent, _LEAST_COST)
