"""How much the rows of a class differ in their acceptance.

log f of a row (``row_rates.py``) has mean 0 and variance s² among the rows of its class. A round
adds to what is known of a row

    e = A - V P          accepted labels, less those that the class had predicted
    w = V P (1 - P)      so that E[e] = -w log f, to first order

of V labels of which A are accepted and P is predicted. Given f, rounds are independent. So for two
rounds i ≠ j of a row E[e_i e_j] = w_i w_j s², however much labels vary by chance, and

    s² = (Σ e_i e_j + c s_0²) / (Σ w_i w_j + c)      pairs of rounds of each row, s_0 = 0.5, c = 20

in which older rounds count less. From the labels of a row its log f is then known up to the
standard deviation

    σ = 1 / sqrt(1 / s² + Σ w)
"""

from math import sqrt

_FIRST = 0.5  # s_0
_FIRST_STRENGTH = 20.0  # c
_KEPT = 0.998  # per round of a row
_LEAST = 0.1**2  # s²


class Evidence:
    """What the rounds of a row have shown of its log f.

    Attributes:
        surplus: Σ e.
        weight: Σ w.
    """

    __slots__ = ("surplus", "weight")

    def __init__(self) -> None:
        self.surplus = self.weight = 0.0


class Spread:
    """The estimate s of a class."""

    __slots__ = ("_products", "_weights", "variance")

    def __init__(self) -> None:
        self._products, self._weights = _FIRST_STRENGTH * _FIRST**2, _FIRST_STRENGTH
        self.variance = _FIRST**2

    def learn(self, row: Evidence, accepted: float, tried: float, predicted: float) -> None:
        """Takes a round of a row, which is added to what is known of the row, too.

        Args:
            row: what its earlier rounds have shown.
            accepted: A.
            tried: V.
            predicted: V P.
        """
        e, w = accepted - predicted, predicted * (1 - predicted / tried)
        self._products = _KEPT * self._products + e * row.surplus
        self._weights = _KEPT * self._weights + w * row.weight
        row.surplus += e
        row.weight += w
        self.variance = max(_LEAST, self._products / self._weights)

    def deviation(self, row: Evidence) -> float:
        """σ of a row."""
        return 1 / sqrt(1 / self.variance + row.weight)

    def strength(self, mean: float) -> float:
        """Labels that the class counts as in an estimate of a row: a beta distribution of this
        strength and of mean P has log odds with the variance s².

        Args:
            mean: P.
        """
        return 1 / (self.variance * mean * (1 - mean))
