"""What may watch an engine's rounds, and act between them.

An observer has its numbers copied to the host with those of the round, so that a round keeps its
one device-to-host synchronisation. Nothing of this costs anything while there is no observer.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.core import Round
from outrider.engine.request import Row
from outrider.engine.round_counts import RoundCounts


@dataclass(frozen=True)
class RowRound:
    """What a round did to a row, once the row has taken its tokens.

    Attributes:
        row: the row.
        start: index of the root in the row's sequence (prompt and output).
        counts: what the round did to it.
        accepted: number of accepted tokens.
        kept: number of tokens that it took: those of the accepted ones and the next token that do
            not lie after the end of the output.
    """

    row: Row
    start: int
    counts: RoundCounts
    accepted: int
    kept: int

    @property
    def num_verified(self) -> int:
        """Positions that the rule verified: those of the accepted tokens, and of the first rejected
        one. Neither the position of a bonus token is one, nor any after a rejected token."""
        return min(self.accepted + self.counts.rejected, self.kept)


class Observation(Protocol):
    """What an observer makes of one round."""

    @property
    def blocks(self) -> Sequence[Tensor]:
        """Numbers to copy to the host, each (B, ·), the same number in every round or none."""

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        """Takes over a row's numbers of the blocks. Called once for each row that has no error."""


class RoundObserver(Protocol):
    """Watches the rounds of an engine, in whatever threads they run."""

    def round(self) -> AbstractContextManager[None]:
        """Entered before a round proposes, and left once it is committed. Between the rounds, the
        observer may change the weights of the draft model."""

    def observe(self, round_: Round, rows: Sequence[Row]) -> Observation:
        """What is to be copied of a round that is not committed yet; must not wait for the
        device."""


@dataclass
class Observed:
    """The observer of an engine, which may come and go between two rounds."""

    observer: RoundObserver | None = None
