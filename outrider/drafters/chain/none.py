"""No draft at all: plain autoregressive decoding in the same loop.

Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core import (
    Acceptance,
    Budget,
    Context,
    Draft,
    Drawn,
    Lengths,
    Scores,
    Stream,
)


class NoState:
    """The state of a drafter that remembers nothing."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""

    def rollback(self, lengths: Lengths) -> None:
        """Nothing to forget."""


@dataclass(frozen=True)
class NoDraft:
    """Proposes the root alone; the verifier then draws one token from the target's distribution."""

    drawn: Drawn = "chosen"

    def max_nodes(self, num_tokens: int) -> int:
        """Most slots behind the context that a draft takes: the root's."""
        return 1

    def start(self, context: Context) -> NoState:
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        return Draft.root_only(context.root_B)

    def commit(self, state: NoState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""
