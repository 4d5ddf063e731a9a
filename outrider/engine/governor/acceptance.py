"""Estimates of acceptance, by position in the draft and by row.

The probability that the k-th drafted token is accepted, given that those before it were, is

    p_k = 1 / (1 + f o_k)

o_k belongs to the position: the odds against acceptance, the prior that the rows of a class share:
sampled ones, greedy ones, and greedy ones that repeat themselves (``repetition.py``). f belongs to
the row: the odds against what the row accepted over the odds against what the class had predicted.
Both are estimated from discounted counts of labels, which are 1 for each accepted token and 0 for
the first rejected one. A position that was asked for and that the draft did not reach counts as
rejected, so that p_k says what asking for it is worth.

Where token-level rejection sampling has verified a chain x_1 … x_n, the expected counts, given the
draft, take the place of the counts. With r_i = min(1, p(x_i) / q(x_i)), a round adds

    r_1 … r_{k-1}   to tried_k       the probability that position k is verified
    r_1 … r_k       to accepted_k    the probability that its token is accepted, too

They have the same means as the counts, and less variance (Rao and Blackwell).

A review (``reviews.py``) gives labels of the first position without a draft: the probabilities of
acceptance, from 0 to 1, that tokens which the target emitted would have had.

    o_k = odds against (accepted_k + s p_{k-1}) / (tried_k + s)      p_0: what is assumed
    p_0 = (A_1 + 16 * 0.6) / (V_1 + 16)        A_1 accepted of the last V_1 first tokens, some 30
    f   = odds against (A + r P) / (V + r)  over  odds against P
                                               P the class's mean prediction in V labels, r = 5

In rounds without a label f goes back towards 1, log f by 3 % a round: the text moves on, and a row
that was given up after a few rejected drafts is tried again if its class accepts them. Reviews may
be too dear to show it.

Counts are discounted by the rounds between two labels. So an estimate moves only where there is
evidence, and new evidence outweighs old evidence the more, the longer nothing was drafted. A class
is discounted by 16 rounds at most: one rejected draft after a long pause is little evidence. Nor is
a first one, so p_0 counts for 16 labels at first, each label takes one away, and 2 remain. That p_0
remembers longer matters where little is drafted: the few labels of probes would leave 0.6, and each
new output would begin with drafts that hundreds of rounds have shown to be useless.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from outrider.engine.governor.repetition import Repetition

ASSUMED = 0.6
"""p_0, the acceptance that is assumed, where nothing has been verified."""

_STRENGTH = 2.0
_FIRST_STRENGTH = 16.0  # of p_0, before the first label
_ROW_STRENGTH = 5.0
_KEPT = 0.97
_KEPT_LONG = 0.97  # per label, by p_0
_LONGEST_PAUSE = 16  # rounds
_ROW_KEPT = 0.9
_FACTOR_KEPT = 0.97  # of log f, per round without a label
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


class Counts(NamedTuple):
    """What a round adds to the counts of each position of a draft, from the first position on.

    Attributes:
        tried: 1 where the position was verified, or the probability that it is.
        accepted: 1 where its token was accepted, or the probability that it is; else 0.
    """

    tried: Sequence[float]
    accepted: Sequence[float]

    @classmethod
    @cache  # one for each pair, as most rows need one in each round
    def of(cls, length: int, accepted: int) -> "Counts":
        """The counts of a draft of which so many tokens were accepted.

        Args:
            length: how many tokens were asked for.
            accepted: how many were accepted.
        """
        tried = min(accepted + 1, length)
        return cls((1.0,) * tried, tuple(float(k < accepted) for k in range(tried)))

    @classmethod
    def expected(cls, length: int, reached: Sequence[float], overlap: Sequence[float]) -> "Counts":
        """The expected counts of a draft, whatever was accepted of it.

        Args:
            length: how many tokens were asked for, at least 1.
            reached: r_1 … r_{k-1} of each position k; 0 where the draft has no such position.
            overlap: r_1 … r_k of each position k.
        """
        drafted = sum([w > 0 for w in reached[:length]])
        tried, accepted = list(reached[:drafted]), list(overlap[:drafted])
        if drafted < length:
            tried.append(accepted[-1] if drafted else 1.0)
            accepted.append(0.0)
        return cls(tried, accepted)


class PositionRates:
    """The estimates o_k of a class of rows."""

    def __init__(self) -> None:
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
        longest = max([len(tried) for tried, _ in drafts], default=0)
        if not longest:
            return
        self._fade(now, longest)
        all_tried, all_accepted = self._tried, self._accepted
        for tried, accepted in drafts:
            if tried:
                self._take_first(accepted[0])
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
        self._fade(now, 1)
        for label in labels:
            self._take_first(label)
        weight = min(1.0, _MOST_REVIEWED / len(labels))
        self._accepted[0] += weight * sum(labels)
        self._tried[0] += weight * len(labels)

    def _fade(self, now: int, longest: int) -> None:
        """Discounts the counts, and makes room for those of ``longest`` positions."""
        missing = [0.0] * (longest - len(self._tried))
        kept = _KEPT ** min(now - self._last, _LONGEST_PAUSE)
        self._accepted = [n * kept for n in self._accepted] + missing
        self._tried = [n * kept for n in self._tried] + missing
        self._last = now
        self._odds = []

    def _take_first(self, label: float) -> None:
        """Takes a label of the first position for p_0."""
        self._num_labels += 1
        self._first_accepted = self._first_accepted * _KEPT_LONG + label
        self._first_tried = self._first_tried * _KEPT_LONG + 1

    def odds(self, most: int) -> list[float]:
        """o_k of the first positions."""
        if len(self._odds) < most:
            self._odds = list(self._estimated(most))
        return self._odds[:most]

    def _estimated(self, most: int) -> Iterator[float]:
        assumed = self._first_accepted + _FIRST_STRENGTH * ASSUMED
        p = assumed / (self._first_tried + _FIRST_STRENGTH)
        strength = max(_STRENGTH, _FIRST_STRENGTH - self._num_labels)
        for k in range(most):
            if k < len(self._tried):
                p = (self._accepted[k] + strength * p) / (self._tried[k] + strength)
            yield odds_against(p)
            strength = _STRENGTH


class RowRates:
    """The estimate f of a row.

    Attributes:
        factor: f.
        undrafted: committed tokens since the row last drafted: those that a draft model has not
            read.
    """

    __slots__ = ("_accepted", "_last", "_predicted", "_tried", "factor", "undrafted")

    def __init__(self) -> None:
        self.undrafted = 0
        self._last = 0
        self.begin()

    def begin(self) -> None:
        """Begins anew: the row is of another class from now on."""
        self.factor = 1.0
        self._accepted = self._tried = self._predicted = 0.0

    def learn(self, odds: Sequence[float], draft: Counts, now: int) -> None:
        """Takes the row's draft of a round.

        Args:
            odds: o_k, as the class predicted.
            draft: of at least one token.
            now: number of the round.
        """
        tried, accepted = draft
        predicted = sum([w / (1 + o) for w, o in zip(tried, odds, strict=False)])
        self._learn(sum(accepted), sum(tried), predicted, now)

    def review(self, odds: float, labels: Sequence[float], now: int) -> None:
        """Takes the row's labels of a review, at least one; ``odds`` is o_1."""
        self._learn(sum(labels), len(labels), len(labels) / (1 + odds), now)

    def _learn(self, accepted: float, tried: float, predicted: float, now: int) -> None:
        kept = _ROW_KEPT ** (now - self._last)
        self._last = now
        self._accepted = self._accepted * kept + accepted
        self._tried = self._tried * kept + tried
        self._predicted = self._predicted * kept + predicted
        mean = self._predicted / self._tried
        rate = (self._accepted + _ROW_STRENGTH * mean) / (self._tried + _ROW_STRENGTH)
        self.factor = odds_against(rate) / odds_against(mean)

    def survival(self, odds: Sequence[float], now: int | None = None) -> list[float]:
        """The probability that each position and all before it are accepted.

        Args:
            odds: o_k.
            now: number of the round, by which f has gone back towards 1 since the last label; None
                leaves f as the last label left it.
        """
        found, alive, factor = [], 1.0, self.factor
        if now is not None:
            factor **= _FACTOR_KEPT ** (now - self._last)
        for o in odds:
            alive /= 1 + factor * o
            found.append(alive)
        return found


class RowMemory:
    """What the governor remembers of a row.

    Args:
        greedy: whether the row is at temperature 0.
        prompt: the tokens that its output continues.
        output: its output, which grows.
        repeatable: whether its output must be repeatable, and depends on draft lengths.

    Attributes:
        repeatable: as given.
        kind: the class whose estimates it shares.
        rates: by source, the row's acceptance.
        has_changed: whether it began or ceased to repeat itself since its drafts were looked at.
    """

    __slots__ = (
        "_num_followed",
        "_output",
        "_repetition",
        "has_changed",
        "kind",
        "rates",
        "repeatable",
    )

    def __init__(
        self,
        greedy: bool,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        repeatable: bool = False,
    ) -> None:
        self.repeatable = repeatable
        self.rates: dict[int, RowRates] = {}
        self._repetition = Repetition(prompt if greedy else ())
        self.has_changed = self._repetition.is_on
        self.kind = Kind(greedy, self._repetition.is_on)
        self._output, self._num_followed = output, 0

    def follow(self) -> None:
        """Reads what was added to the output since the last call; of greedy rows only."""
        if not self.kind.greedy:
            return
        repetition = self._repetition
        if repetition.take(self._output[self._num_followed :]):
            self.has_changed = True
            self.kind = Kind(self.kind.greedy, repetition.is_on)
            for rates in self.rates.values():
                rates.begin()
        self._num_followed = len(self._output)

    def of(self, source: int) -> RowRates:
        """The row's acceptance of a source."""
        if source not in self.rates:
            self.rates[source] = RowRates()
        return self.rates[source]


def have_changed(rows: Sequence[RowMemory]) -> bool:
    """Whether at least half of the rows have."""
    return 2 * sum([row.has_changed for row in rows]) >= len(rows)


def odds_against(p: float) -> float:
    """(1 - p) / p of a probability, which is kept off 0 and 1."""
    p = min(max(p, _LEAST), 1 - _LEAST)
    return (1 - p) / p


def probability(odds: float) -> float:
    """The probability with these odds against it."""
    return 1 / (1 + odds)
