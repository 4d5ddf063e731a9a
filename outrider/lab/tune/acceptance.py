"""Acceptance by position, as it was measured: nothing is assumed of how positions depend.

The probability that a round emits its i-th drafted token,

    S_i = P(accepted ≥ i),   i = 1 … γ,        E[tokens per round] = 1 + S_1 + … + S_γ

is the share of rounds that did, of those with room for a full draft. Rounds in which a source finds
nothing to copy count as rounds that accept nothing. The acceptance at position i is S_i / S_{i-1}.
A chain with a smaller γ has the same S_1 … S_γ, because whether a token is accepted does not depend
on the tokens after it (block verification is an exception: its S of a shorter draft is lower).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.analysis.acceptance import wilson
from outrider.lab.tune.machine import RowRound


@dataclass(frozen=True)
class Acceptance:
    """The rounds of a source, by prompt.

    Attributes:
        rounds: of each prompt, by its index.
    """

    rounds: Mapping[int, Sequence[RowRound]]

    @property
    def all_rounds(self) -> list[RowRound]:
        """The rounds of all prompts."""
        return [each for rounds in self.rounds.values() for each in rounds]

    def survival(self, length: int) -> list[float]:
        """S_1 … S_γ."""
        rounds = self.all_rounds
        return [
            sum(each.accepted > i for each in rounds) / max(1, len(rounds)) for i in range(length)
        ]

    def by_position(self, length: int) -> list[tuple[float, float, float] | None]:
        """The acceptance at each position with its Wilson interval of 95 %; None at positions that
        no round came to."""
        rounds = self.all_rounds
        found: list[tuple[float, float, float] | None] = []
        for i in range(length):
            tried = [each for each in rounds if each.accepted >= i and each.drafted > i]
            accepted = sum(each.accepted > i for each in tried)
            found.append((accepted / len(tried), *wilson(accepted, len(tried))) if tried else None)
        return found

    def tokens(self, length: int) -> float:
        """Expected tokens per round with drafts of this length."""
        return tokens_per_round(self.survival(length))

    def drafted(self, length: int) -> float:
        """Mean length of a draft of at most ``length`` tokens."""
        rounds = self.all_rounds
        return sum(min(each.drafted, length) for each in rounds) / max(1, len(rounds))

    def and_of(self, more: Mapping[int, Sequence[RowRound]]) -> Acceptance:
        """With the rounds of another run."""
        merged = {prompt: list(rounds) for prompt, rounds in self.rounds.items()}
        for prompt, rounds in more.items():
            merged.setdefault(prompt, []).extend(rounds)
        return Acceptance(merged)


def tokens_per_round(survival: Iterable[float]) -> float:
    """1 + S_1 + … + S_γ."""
    return 1.0 + sum(survival)
