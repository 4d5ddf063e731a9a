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
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

HORIZON = 32
"""Rounds that the seconds of catching up are spread over."""


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


@dataclass(slots=True)
class Option:
    """A source and a draft length, with what is expected of them.

    Attributes:
        source: which of ``Sources.names``.
        length: the draft length.
        believed: tokens and seconds of a round; None before any round was measured.
        catch_up: seconds in which the draft model first reads what it lacks.
        probe: whether it is only tried.
        reviews: whether the draft model is reviewed in a round without drafts.
        rate: tokens per second of the next rounds.
    """

    source: int
    length: int
    believed: Goodput | None
    catch_up: float = 0.0
    probe: bool = False
    reviews: bool = False
    rate: float = 0.0

    def after(self, catch_up: float) -> "Option":
        """The same, where the draft model first reads for so many seconds."""
        assert self.believed is not None
        rate = self.believed.tokens / (self.believed.seconds + catch_up / HORIZON)
        return Option(
            self.source, self.length, self.believed, catch_up, self.probe, self.reviews, rate
        )


class Promise:
    """What the draft lengths of a source promise.

    Args:
        source: which of ``Sources.names``.
        lengths: the draft lengths, ascending from 0.
        tokens: of a round, by length.
        seconds: of a round, by length.
        catch_up: seconds in which the draft model first reads what it lacks.

    Attributes:
        source: as given.
        draft_lengths: the lengths.
        rates: tokens per second, by length.
        best: the length with the most of them.
        hopeful: where drafting nothing promises most, the best length above 0, with what it
            promises if the rows accept more than is believed of them; else None.
    """

    hopeful: Option | None = None

    def __init__(
        self,
        source: int,
        lengths: tuple[int, ...],
        tokens: Sequence[float],
        seconds: Sequence[float],
        catch_up: float,
    ) -> None:
        self.source = source
        self.draft_lengths = lengths
        self._tokens, self._seconds, self._catch_up = tokens, seconds, catch_up
        late = catch_up / HORIZON
        self.rates = [n / (s + late) for n, s in zip(tokens, seconds, strict=True)]
        self.rates[0] = tokens[0] / seconds[0]
        self.best = self.option(self.rates.index(max(self.rates)))

    @property
    def best_draft(self) -> int:
        """The index of the best length above 0."""
        drafting = self.rates[1:]
        return 1 + drafting.index(max(drafting))

    def hope(self, index: int, tokens: float) -> None:
        """Sets ``hopeful``.

        Args:
            index: of the best length above 0.
            tokens: of a round of that length, if the rows accept more than is believed of them.
        """
        believed = Goodput(tokens, self._seconds[index])
        hopeful = Option(self.source, self.draft_lengths[index], believed)
        self.hopeful = hopeful.after(self._catch_up)

    def option(self, index: int) -> Option:
        """The option of a length."""
        return Option(
            self.source,
            self.draft_lengths[index],
            Goodput(self._tokens[index], self._seconds[index]),
            self._catch_up if index else 0.0,
            rate=self.rates[index],
        )


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
