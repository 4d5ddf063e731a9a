"""The estimate of a row's acceptance: by how much it differs from its class.

f, a factor on the class's odds against acceptance, has two estimates from the row's labels,

    f_i = odds against (A_i + r_i P_i) / (V_i + r_i)  over  odds against P_i

                       label per round kept    class counts as
    i = 1, steady      0.95                    r_1 labels, the fewer the more its rows differ
    i = 2, recent      0.75                    r_2 = 2 labels

of the discounted numbers of labels V_i, of accepted ones among them A_i, and of what the class had
predicted of them, P_i V_i. Most rounds that differ from the class differ by chance, so that f_1
predicts better. Where the text changes, f_2 does, after few rounds. r_1, from 5 to 60, follows from
how much the rows of the class differed so far (``spread.py``). The prediction for a label

    p = (1 - w) p_1 + w p_2

weighs both by how well each predicted the labels so far: w is the posterior probability that f_2 is
the better one, if which of them is changes with probability 0.01 per round (the fixed share of
Herbster and Warmuth, 1998).

In rounds without a label f goes back towards 1, log f by 3 % a round: the text moves on, and a row
that was given up after a few rejected drafts is tried again if its class accepts them. Reviews may
be too dear to show it.

log f is known up to a standard deviation σ (``spread.py``). Where drafting nothing promises most,
drafts are compared with it again as if log f were lower by 2 σ (``Governor.promise``): a row that
begins may be better than its class, which rounds without drafts would not show.
"""

from collections.abc import Sequence
from math import exp, log

from outrider.engine.governor.acceptance import probability
from outrider.engine.governor.counts import Counts
from outrider.engine.governor.spread import Evidence, Spread

_STEADY_KEPT, _RECENT_KEPT = 0.95, 0.75  # of a label, per round
_LEAST_STRENGTH, _MOST_STRENGTH = 5.0, 60.0  # r_1
_RECENT_STRENGTH = 2.0  # r_2
_FIRST_WEIGHT = 0.1  # w of a row without labels
_SHARE = 0.01
_FACTOR_KEPT = 0.97  # of log f, per round without a label


class Factor:
    """An estimate of f.

    Args:
        kept: of a label, per round.

    Attributes:
        value: f.
    """

    __slots__ = ("_accepted", "_kept", "_predicted", "_tried", "value")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._accepted = self._tried = self._predicted = 0.0
        self.value = 1.0

    def learn(
        self, accepted: float, tried: float, predicted: float, rounds: int, strength: float
    ) -> None:
        """Takes labels.

        Args:
            accepted: accepted ones.
            tried: all of them.
            predicted: how many of them the class predicted to be accepted.
            rounds: since the last labels.
            strength: labels that the class's prediction counts as.
        """
        kept = self._kept**rounds
        self._accepted = accepted = self._accepted * kept + accepted
        self._tried = tried = self._tried * kept + tried
        self._predicted = predicted = self._predicted * kept + predicted
        mean = predicted / tried
        hits = accepted + strength * mean
        misses = tried + strength - hits
        self.value = misses / hits * mean / (1 - mean)


class RowRates:
    """The estimate f of a row.

    Attributes:
        factor: f.
        undrafted: committed tokens since the row last drafted: those that a draft model has not
            read.
    """

    __slots__ = ("_evidence", "_last", "_recent", "_steady", "_weight", "factor", "undrafted")

    def __init__(self) -> None:
        self.undrafted = 0
        self._last = 0
        self.begin()

    def begin(self) -> None:
        """Begins anew: the row is of another class from now on."""
        self.factor = 1.0
        self._steady, self._recent = Factor(_STEADY_KEPT), Factor(_RECENT_KEPT)
        self._weight = _FIRST_WEIGHT
        self._evidence = Evidence()

    def learn(self, odds: Sequence[float], draft: Counts, now: int, spread: Spread) -> None:
        """Takes the row's draft of a round.

        Args:
            odds: o_k, as the class predicted.
            draft: of at least one token.
            now: number of the round.
            spread: of the row's class, which learns, too.
        """
        tried = accepted = predicted = 0.0
        for tried_k, accepted_k, o in zip(draft.tried, draft.accepted, odds, strict=False):
            tried += tried_k
            accepted += accepted_k
            predicted += tried_k / (1 + o)
        self._learn(accepted, tried, predicted, now, spread)

    def review(self, odds: float, labels: Sequence[float], now: int, spread: Spread) -> None:
        """Takes the row's labels of a review, at least one; ``odds`` is o_1. They come one by one,
        since the first of them teach f_2 to predict the others."""
        for label in labels:
            self._learn(label, 1.0, 1 / (1 + odds), now, spread)

    def _learn(
        self, accepted: float, tried: float, predicted: float, now: int, spread: Spread
    ) -> None:
        rounds, self._last = now - self._last, now
        odds = (tried - predicted) / predicted
        steady, recent = self._steady, self._recent
        weight = self._weight = self._weighed(accepted, tried, odds, rounds)
        spread.learn(self._evidence, accepted, tried, predicted)
        strength = spread.strength(predicted / tried)
        strength = min(max(strength, _LEAST_STRENGTH), _MOST_STRENGTH)
        steady.learn(accepted, tried, predicted, rounds, strength)
        recent.learn(accepted, tried, predicted, rounds, _RECENT_STRENGTH)
        p_1, p_2 = probability(steady.value * odds), probability(recent.value * odds)
        p = (1 - weight) * p_1 + weight * p_2
        self.factor = (1 - p) / p / odds

    def _weighed(self, accepted: float, tried: float, odds: float, rounds: int) -> float:
        """w, updated by what both estimates had predicted of labels."""
        f_1, f_2 = self._steady.value, self._recent.value
        if rounds > 1:
            back = _FACTOR_KEPT ** (rounds - 1)
            f_1, f_2 = f_1**back, f_2**back
        o_1, o_2 = odds * f_1, odds * f_2
        log_ratio = (tried - accepted) * log(o_2 / o_1) - tried * log((1 + o_2) / (1 + o_1))
        ratio = exp(max(-30.0, min(30.0, log_ratio)))
        before = self._weight
        weight = before * ratio / (before * ratio + 1 - before)
        return weight + _SHARE * (1 - 2 * weight)

    def deviation(self, spread: Spread) -> float:
        """σ, with the spread of the row's class."""
        return spread.deviation(self._evidence)

    def survival(
        self, odds: Sequence[float], now: int | None = None, hope: float = 0.0
    ) -> list[float]:
        """The probability that each position and all before it are accepted.

        Args:
            odds: o_k.
            now: number of the round, by which f has gone back towards 1 since the last label; None
                leaves f as the last label left it.
            hope: by how much log f is taken to be lower.
        """
        found, alive, factor = [], 1.0, self.factor
        if now is not None:
            factor **= _FACTOR_KEPT ** (now - self._last)
        if hope:
            factor *= exp(-hope)
        for o in odds:
            alive /= 1 + factor * o
            found.append(alive)
        return found
