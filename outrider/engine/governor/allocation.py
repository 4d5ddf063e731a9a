"""How many tokens to draft: the length at which the batch commits most tokens per second.

    goodput(γ) = (B + Σ_b Σ_{k ≤ min(γ, γ_b)} S_bk) / seconds(γ)

S_bk is the estimated probability that row b accepts its first k tokens, so the numerator is the
expected number of tokens of a round. This is the goodput of TurboSpec (Liu et al., arXiv
2406.14066) and of vLLM's adaptive verification, which spread a budget of tokens over the rows by
S_bk. Here a forward pass is a rectangle: once one row drafts γ tokens, the others may, too, at no
further cost. The budget is therefore the width of the rectangle, and its marginal gain the sum of
S_bk over all rows that may draft a k-th token.

Legend: B rows, γ_b the most tokens that row b may draft.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Goodput(NamedTuple):
    """What a draft length is expected to give.

    Attributes:
        tokens: expected number of tokens of a round.
        seconds: expected seconds of the round.
    """

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def expected_tokens(
    survivals: Iterable[Sequence[float]], num_rows: int, lengths: Sequence[int]
) -> list[float]:
    """The expected number of tokens of a round, by draft length.

    Args:
        survivals: S_bk of each row b, as many as the row may draft.
        num_rows: B.
        lengths: the draft lengths, ascending.
    """
    gains = [0.0] * (lengths[-1] + 1)
    gains[0] = float(num_rows)
    for survival in survivals:
        for k, probability in enumerate(survival[: lengths[-1]], 1):
            gains[k] += probability
    totals = list(accumulate(gains))
    return [totals[length] for length in lengths]
