"""Acceptance by position, as it was measured: nothing is assumed of how positions depend.

The probability that a round emits its i-th drafted token,

    S_i = P(accepted ≥ i),   i = 1 … γ,        E[tokens per round] = 1 + S_1 + … + S_γ

is the share of rounds that did, of those with room for a full draft. Rounds in which a source finds
nothing to copy count as rounds that accept nothing. The acceptance at position i is S_i / S_{i-1}.

Whether a token is accepted does not depend on the tokens after it (block verification is an
exception: its S of a shorter draft is lower). But rounds of a smaller γ are not just those of a
larger one, cut: what one long draft copies takes several short ones, so that good stretches make up
more of the rounds. With copies of nine tokens in a third of the long rounds, the first token of a
short draft is accepted in far more than a third. See :meth:`Acceptance.with_drafts_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.lab.analysis.acceptance import wilson
from outrider.lab.tune.machine import RowRound


@dataclass(frozen=True)
class Acceptance:
    """The rounds of a source, by prompt.

    Attributes:
        rounds: of each prompt, by its index, in order.
        fades: whether a drafted token is worse for being late in its draft; see :class:`Source`.
    """

    rounds: Mapping[int, Sequence[RowRound]]
    fades: bool = False

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
        return tokens_per_round(self.with_drafts_of(length).survival(length))

    def with_drafts_of(self, length: int) -> Acceptance:
        """The rounds that the same outputs take with drafts of at most ``length`` tokens.

        A long round becomes the short ones that emit its tokens: each is accepted as far as the
        long one was at these positions. Where drafts fade, short ones in the middle of long ones
        would look as bad as these, so the long rounds are cut.
        """
        longest = max((each.drafted for each in self.all_rounds), default=0)
        if longest <= length:
            return self
        shorter = _cut if self.fades else _split
        found = {prompt: shorter(rounds, length, longest) for prompt, rounds in self.rounds.items()}
        return replace(self, rounds=found)

    def drafted(self, length: int) -> float:
        """Mean length of a draft of at most ``length`` tokens."""
        rounds = self.all_rounds
        return sum(min(each.drafted, length) for each in rounds) / max(1, len(rounds))

    def and_of(self, more: Mapping[int, Sequence[RowRound]]) -> Acceptance:
        """With the rounds of another run."""
        merged = {prompt: list(rounds) for prompt, rounds in self.rounds.items()}
        for prompt, rounds in more.items():
            merged.setdefault(prompt, []).extend(rounds)
        return replace(self, rounds=merged)


def _cut(rounds: Sequence[RowRound], length: int, longest: int) -> list[RowRound]:
    """The beginnings of the drafts."""
    return [RowRound(min(each.drafted, length), min(each.accepted, length)) for each in rounds]


def _split(rounds: Sequence[RowRound], length: int, longest: int) -> list[RowRound]:
    """The rounds with drafts of ``length`` tokens that emit the tokens of rounds whose drafts had
    ``longest`` tokens at most. A draft that ended at that length alone would have gone on.

    Of the token after a draft that was accepted as a whole nothing is known. It takes no round of
    its own, as if the source had drafted it in the next one.
    """
    found: list[RowRound] = []
    for drafted, accepted in _joined(rounds, longest):
        is_long = drafted >= longest
        unknown = drafted == accepted > length
        while accepted > length:
            found.append(RowRound(length, length))
            drafted, accepted = drafted - length - 1, accepted - length - 1
        if drafted or not unknown:
            found.append(RowRound(length if is_long else min(drafted, length), accepted))
    return found


def _joined(rounds: Sequence[RowRound], longest: int) -> Iterator[tuple[int, int]]:
    """Drafted and accepted tokens of each round. A longest draft that was accepted as a whole is
    one with that of the next round if this accepts anything: the source went on with the same
    copy, and the token between the two counts as accepted."""
    drafted, accepted = 0, 0
    for number, each in enumerate(rounds):
        if number and accepted == drafted >= longest and each.accepted:
            drafted, accepted = drafted + 1 + each.drafted, accepted + 1 + each.accepted
            continue
        if number:
            yield drafted, accepted
        drafted, accepted = each.drafted, each.accepted
    if rounds:
        yield drafted, accepted


def tokens_per_round(survival: Iterable[float]) -> float:
    """1 + S_1 + … + S_γ."""
    return 1.0 + sum(survival)
