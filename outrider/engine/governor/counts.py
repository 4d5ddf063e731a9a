"""What a round shows of the acceptance of a draft: counts by position.

They are labels, 1 for each accepted token and 0 for the first rejected one. A position that was
asked for and that the draft did not reach counts as rejected.

Where token-level rejection sampling has verified a chain x_1 … x_n, the expected counts, given the
draft, take the place of the counts. With r_i = min(1, p(x_i) / q(x_i)), a round adds

    r_1 … r_{k-1}   to tried_k       the probability that position k is verified
    r_1 … r_k       to accepted_k    the probability that its token is accepted, too

They have the same means as the counts, and less variance (Rao and Blackwell).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


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
