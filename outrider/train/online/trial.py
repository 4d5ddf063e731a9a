"""A trial of new weights against the old ones, on the same traffic.

Rounds are run in blocks. Of each pair of blocks one is drafted with the old weights and one with
the new ones, in an order that a coin decides. With d the mean acceptance of the old block less that
of the new one, in [-1, 1], the test bets that the new weights are accepted less (Waudby-Smith and
Ramdas, "Estimating means of bounded random variables by betting", 2024,
https://arxiv.org/abs/2010.09686). Its wealth

    K = mean over λ of Π (1 + λ d_i),   0 < λ < 1

is a non-negative martingale that begins at 1, if the two are accepted equally often: whatever the
traffic does to the two blocks of a pair, the coin makes E[d] = 0. By Ville's inequality, K then
ever reaches 1/δ with probability δ at most. So traffic that turns to another domain, or from
sampled to greedy requests, raises no more false alarms than traffic that stays as it is.

The acceptance of a block is the mean, over its rounds' rows, of the unbiased estimate of
Σ min(p, q) at the first drafted position.
"""

from __future__ import annotations

import random

BLOCK_ROUNDS = 4
"""Rounds of a block. Weights are copied once per block at most."""

_BETS = (1 / 8, 1 / 4, 1 / 2, 7 / 8)


class Trial:
    """Decides which weights draft each block, and whether the new ones have failed.

    Args:
        false_alarm: δ, the probability of failing weights that are accepted as often as the old
            ones.
        rng: tosses the coin.

    Attributes:
        has_failed: whether the new weights are accepted less; stays so.
        num_rounds: rounds that have begun.
        uses_new: whether the round that began last drafts with the new weights.
    """

    def __init__(self, false_alarm: float, rng: random.Random) -> None:
        self._bound = 1 / false_alarm
        self._rng = rng
        self._wealth = [1.0] * len(_BETS)
        self._values: dict[bool, list[float]] = {False: [], True: []}
        self.has_failed = False
        self.num_rounds = 0
        self.uses_new = False

    def begin_round(self) -> None:
        """Decides which weights the next round drafts with."""
        index = self.num_rounds % (2 * BLOCK_ROUNDS)
        if index == 0:
            self._close_pair()
            self.uses_new = self._rng.random() < 0.5
        elif index == BLOCK_ROUNDS:
            self.uses_new = not self.uses_new
        self.num_rounds += 1

    def add(self, value: float) -> None:
        """Counts the acceptance of one row in the round, in [0, 1]."""
        self._values[self.uses_new].append(value)

    def _close_pair(self) -> None:
        """Bets on the last two blocks; those without a draft say nothing."""
        old, new = self._values[False], self._values[True]
        if old and new:
            difference = sum(old) / len(old) - sum(new) / len(new)
            self._wealth = [
                wealth * (1 + bet * difference)
                for wealth, bet in zip(self._wealth, _BETS, strict=True)
            ]
            self.has_failed |= sum(self._wealth) >= self._bound * len(self._wealth)
        self._values = {False: [], True: []}
