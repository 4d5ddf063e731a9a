"""Reviews: a draft model that has fallen behind is compared with what the target emitted meanwhile.

After rounds without drafts a draft model lacks the tokens that they emitted. It has to read them
before it can draft, and one forward pass over n of them gives its distributions q_i before each.
With x_i drawn from the target's p_i,

    E[min(1, q_i(x_i) / p_i(x_i))] = sum_x min(p_i(x), q_i(x))

which is the probability that a token drafted there would have been accepted, by rejection sampling
and as the first one by block verification. At temperature 0 it is whether x_i is the argmax of q_i.
So a review yields n labels of acceptance for a single pass of the draft model, where a probe yields
one for a pass over what it lacks, a draft, and a wider pass of the target.

Reviews look at committed tokens alone and choose for later rounds, so they bias no output. They
may take 1 % of the time (``Governor.review_credit``).
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider.engine.governor.acceptance import RowMemory
from outrider.engine.governor.allocation import Option
from outrider.engine.governor.governor import REVIEW_SHARE, Governor
from outrider.engine.governor.outcomes import Asked

MOST_REVIEWED = 16
"""Most tokens of each row that are compared."""

_LEAST_AGE = 6  # rounds
_LEAST_LABELS = 6
_EARNED = 0.5
_AT_MOST = 4.0  # times the share that reviews earn, where credit was saved
_LEAST_COST = 0.02


class Reviews:
    """The reviews of one running batch.

    Args:
        governor: what the engine has learned.
    """

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._cost = 0.0

    def choose(
        self, best: Option, rows: Sequence[RowMemory], greedy: bool, reviewable: int
    ) -> Option | None:
        """The option of drafting nothing, with a review, if one is due and the credit pays for it.
        Credit that was saved up lets reviews follow each other twice as fast.

        Args:
            best: the option of drafting nothing.
            rows: what is remembered of the rows.
            greedy: whether all rows are.
            reviewable: tokens of each row that would be compared.
        """
        if reviewable * len(rows) < _LEAST_LABELS or best.believed is None:
            return None
        governor = self._governor
        reading = governor.costs(greedy, 0).catch_up(len(rows), governor.behind(0, rows))
        cost = max(reading / best.believed.seconds, _LEAST_COST)
        age = governor.now - governor.compared[greedy]
        if age < max(_LEAST_AGE, cost / (_AT_MOST * REVIEW_SHARE)):
            return None
        if governor.review_credit < _EARNED * cost:
            return None
        self._cost = cost
        return replace(best, reviews=True)

    def pay(self, asked: Asked, seconds: float) -> None:
        """Charges a review with the rounds that it took, but no more than twice what was expected,
        since something else may have delayed it."""
        assert asked.believed is not None
        spent = min(seconds / asked.believed.seconds, 2 * self._cost)
        self._governor.review_credit -= max(spent, _LEAST_COST)
