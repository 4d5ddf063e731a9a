"""Estimates of acceptance, by position in the draft and by row.

The probability that the k-th drafted token is accepted, given that those before it were, is

    p_k = 1 / (1 + f o_k)

o_k belongs to the position: the odds against acceptance, the prior that the rows of a class share:
sampled ones, greedy ones, and greedy ones that repeat themselves (``repetition.py``). f belongs to
the row (``row_rates.py``). Both are estimated from discounted counts of labels (``counts.py``), so
that p_k says what asking for position k is worth.

A review (``reviews.py``) gives labels of the first position without a draft: the probabilities of
acceptance, from 0 to 1, that tokens which the target emitted would have had.

    o_k = odds against (accepted_k + s p_{k-1}) / (tried_k + s)      p_0: what is assumed
    p_0 = (A_1 + 16 * 0.6) / (V_1 + 16)        A_1 accepted of the last V_1 first tokens, some 30

Counts are discounted by the rounds between two labels. So an estimate moves only where there is
evidence, and new evidence outweighs old evidence the more, the longer nothing was drafted. A class
is discounted by 16 rounds at most: one rejected draft after a long pause is little evidence. Nor is
a first one, so p_0 counts for 16 labels at first, each label takes one away, and 2 remain. That p_0
remembers longer matters where little is drafted: the few labels of probes would leave 0.6, and each
new output would begin with drafts that hundreds of rounds have shown to be useless.

A round of 32 rows gives 32 labels, and the next round may be of a single row and of another kind of
text. So counts weigh at most as much as if all rounds had given as few labels as the newest one.
"""

from collections.abc import Sequence
from typing import NamedTuple

from outrider.engine.governor.counts import Counts
from outrider.engine.governor.spread import Spread

ASSUMED = 0.6
"""p_0, the acceptance that is assumed, where nothing has been verified."""

_STRENGTH = 2.0
_FIRST_STRENGTH = 16.0  # of p_0, before the first label
_KEPT = 0.98
_KEPT_LONG = 0.97  # per label, by p_0
_LONGEST_PAUSE = 16  # rounds
_MOST_REVIEWED = 24  # labels that a review counts as at most
_LEAST = 0.005


class Kind(NamedTuple):
    """A class of rows.

    Attributes:
        greedy: whether they are at temperature 0.
        repeats: whether they are and repeat themselves.
    """

    greedy: bool
    repeats: bool = False


class PositionRates:
    """The estimates o_k of a class of rows.

    Attributes:
        spread: how much its rows differ.
    """

    def __init__(self) -> None:
        self.spread = Spread()
        self._accepted: list[float] = []
        self._tried: list[float] = []
        self._last = 0
        self._num_labels = 0
        self._first_accepted = self._first_tried = 0.0
        self._odds: list[float] = []

    def learn(self, drafts: Sequence[Counts], now: int) -> None:
        """Takes the drafts of a round.

        Args:
            drafts: of the rows.
            now: number of the round, counted over all batches.
        """
        drafts = [draft for draft in drafts if draft.tried]
        if not drafts:
            return
        longest = max([len(tried) for tried, _ in drafts])
        self._fade(now, longest, sum([tried[0] for tried, _ in drafts]))
        self._take_first([accepted[0] for _, accepted in drafts])
        all_tried, all_accepted = self._tried, self._accepted
        for tried, accepted in drafts:
            for k, share in enumerate(tried):
                all_tried[k] += share
                all_accepted[k] += accepted[k]

    def review(self, labels: Sequence[float], now: int) -> None:
        """Takes the labels of a review, at least one; many of them weigh no more than some rounds
        do.

        Args:
            labels: of tokens that were emitted without a draft.
            now: number of the round, as of :meth:`learn`.
        """
        weight = min(1.0, _MOST_REVIEWED / len(labels))
        self._fade(now, 1, weight * len(labels))
        self._take_first(labels)
        self._accepted[0] += weight * sum(labels)
        self._tried[0] += weight * len(labels)

    def _fade(self, now: int, longest: int, num_labels: float) -> None:
        """Discounts the counts before so many labels of the first position are added, and makes
        room for those of ``longest`` positions. They keep no more labels than if they had always
        come at this rate."""
        missing = [0.0] * (longest - len(self._tried))
        kept = _KEPT ** min(max(1, now - self._last), _LONGEST_PAUSE)
        if self._tried and self._tried[0]:
            kept = min(kept, kept * num_labels / (1 - kept) / self._tried[0])
        self._accepted = [n * kept for n in self._accepted] + missing
        self._tried = [n * kept for n in self._tried] + missing
        self._last = now
        self._odds = []

    def _take_first(self, labels: Sequence[float]) -> None:
        """Takes labels of the first position for p_0."""
        self._num_labels += len(labels)
        accepted, tried = self._first_accepted, self._first_tried
        for label in labels:
            accepted = accepted * _KEPT_LONG + label
            tried = tried * _KEPT_LONG + 1
        self._first_accepted, self._first_tried = accepted, tried

    def odds(self, most: int) -> list[float]:
        """o_k of the first positions."""
        if len(self._odds) < most:
            self._odds = self._estimated(most)
        return self._odds[:most]

    def _estimated(self, most: int) -> list[float]:
        assumed = self._first_accepted + _FIRST_STRENGTH * ASSUMED
        p = assumed / (self._first_tried + _FIRST_STRENGTH)
        strength = max(_STRENGTH, _FIRST_STRENGTH - self._num_labels)
        odds = []
        for tried, accepted in zip(self._tried[:most], self._accepted, strict=False):
            p = (accepted + strength * p) / (tried + strength)
            odds.append(odds_against(p))
            strength = _STRENGTH
        return odds + [odds_against(p)] * (most - len(odds))


def odds_against(p: float) -> float:
    """(1 - p) / p of a probability, which is kept off 0 and 1."""
    p = min(max(p, _LEAST), 1 - _LEAST)
    return (1 - p) / p


def probability(odds: float) -> float:
    """The probability with these odds against it."""
    return 1 / (1 + odds)
