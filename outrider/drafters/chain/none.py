"""No draft at all: plain autoregressive decoding in the same loop.

Legend: B rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Scores, Stream, Verdict


class NoState:
    """Remembers nothing."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""

    def rewind(self, length_B: Tensor, lengths: Sequence[int]) -> None:
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

    def commit(self, state: NoState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""
