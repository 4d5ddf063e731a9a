"""No draft at all: plain autoregressive decoding in the same loop.

Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
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

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(drafts=False, max_nodes=lambda num_tokens: 1, rewindable=True)

    def start(self, context: Context) -> NoState:
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        return Draft.root_only(context.root_B)

    def commit(self, state: NoState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""
