"""A sequential test of whether acceptance has fallen.

Under test are values x_1, x_2, … in [0, 1]: for each row of each round, the unbiased estimate of
Σ min(p, q) at its first drafted position. The reference are n₀ such values from before. The test
bets against "the mean is still at least m" (Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting", 2024, https://arxiv.org/abs/2010.09686): its wealth

    K_t = mean over λ of Π_{i ≤ t} (1 + λ (m - x_i)),   0 < λ < 1 / (1 - m)

is a non-negative supermartingale that begins at 1 while each value's mean, given those before it,
is at least m. By Ville's inequality it then ever exceeds 2/δ with probability δ/2 at most. The
number m is the reference's mean less Hoeffding's radius √(ln(2/δ) / 2n₀), below which the true
mean of n₀ independent values lies with probability 1 - δ/2 at least. So however long the test runs,
it raises a false alarm with probability δ at most.

The statement is about values of equal mean. Traffic that turns to another domain changes the mean
without a fault of the weights, and may raise an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Collection

_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""The bets λ, as shares of the largest, 1 / (1 - m)."""


class FallTest:
    """Compares the values that are added with a reference.

    Args:
        reference: values in [0, 1].
        false_alarm: δ.

    Attributes:
        least: m, the mean that the values are not to fall below; 0 without enough reference.
        has_fallen: whether the alarm has been raised; stays so.
    """

    def __init__(self, reference: Collection[float], false_alarm: float) -> None:
        self.least = 0.0
        if reference:
            radius = math.sqrt(math.log(2 / false_alarm) / (2 * len(reference)))
            self.least = max(0.0, math.fsum(reference) / len(reference) - radius)
        self.has_fallen = False
        self._bound = 2 / false_alarm
        widest = 1 / max(1 - self.least, 1e-3)
        self._bets = [share * widest for share in _SHARES]
        self._wealth = [1.0] * len(_SHARES)

    def add(self, value: float) -> bool:
        """Adds a value; returns :attr:`has_fallen`."""
        gain = self.least - value
        self._wealth = [
            w * (1 + bet * gain) for w, bet in zip(self._wealth, self._bets, strict=True)
        ]
        self.has_fallen |= sum(self._wealth) > self._bound * len(self._wealth)
        return self.has_fallen
