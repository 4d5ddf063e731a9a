"""The interfaces of models, drafters and verifiers.

A round has four steps: the drafter *proposes*, the target *scores*, the verifier *verifies*, and
model and drafter *commit*. Rows leave a running batch by ``keep`` and enter it by ``join``, which
every per-batch state supports.

Legend: B rows, N nodes, V vocabulary, H hidden width.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from outrider.core.bound import Bound
from outrider.core.context import Context
from outrider.core.draft import Draft, Drawn, Verdict
from outrider.core.rng import Stream


class State(Protocol):
    """What a model or drafter remembers about a batch."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; ``rows[i] >= i``. An empty list ends the batch."""


@dataclass(frozen=True)
class Scores:
    """The target's logits at every node of a draft, and its last hidden states if requested."""

    logits_BNV: Tensor
    hidden_BNH: Tensor | None = None


@dataclass(frozen=True)
class Budget:
    """How many tokens may be drafted this round along any one path, i.e. the depth of the tree.

    A round emits at most one token more than that. The drafter decides how many nodes a tree has.

    Attributes:
        max_tokens: the largest budget of any row.
        tokens_B: the budget of each row; None if all rows have ``max_tokens``.
    """

    max_tokens: int
    tokens_B: Tensor | None = None


Needs = Literal["distribution", "argmax", "logits"]
"""What a verifier reads: the target distributions; anything with the same argmax; or the target's
logits before temperature and truncation (for rules at temperature 0 that use more than the
argmax). For the last two, no distribution is computed."""

S = TypeVar("S", bound=State)


class Model(Protocol[S]):
    """A model that scores trees of tokens and can roll back: the target of a round."""

    def start(self, context: Context) -> S:
        """Processes every token of the context except the last, and returns the cache."""

    def score(self, cache: S, draft: Draft) -> Scores:
        """One forward pass over all nodes; caches them after the committed tokens."""

    def commit(self, cache: S, draft: Draft, verdict: Verdict) -> None:
        """Keeps the root and the accepted path, discards the other nodes. Mutates the cache."""

    def join(self, cache: S, other: S) -> None:
        """Appends the rows of another cache. Mutates the first cache."""


class Drafter(Protocol[S]):
    """A source of drafts. It holds the weights; everything about a batch lives in its state."""

    @property
    def drawn(self) -> Drawn:
        """How the siblings that it proposes are obtained."""

    def start(self, context: Context) -> S:
        """The state for a batch of rows."""

    def propose(self, state: S, context: Context, budget: Budget, rng: Stream) -> Draft:
        """A draft rooted at the context's last token, at most ``budget`` tokens deep."""

    def commit(self, state: S, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Updates the state with what was accepted. Mutates the state."""

    def join(self, state: S, other: S) -> None:
        """Appends the rows of another state. Mutates the first state."""


class Verifier(Protocol):
    """A rule that turns a draft and the target distributions into emitted tokens."""

    @property
    def lossless(self) -> bool:
        """Whether the output has exactly the target distribution."""

    @property
    def accepts(self) -> AbstractSet[Drawn]:
        """The kinds of drafts that the rule is valid for; others would bias the output."""

    @property
    def needs(self) -> Needs:
        """What the rule expects as ``p_BNV``."""

    @property
    def bound(self) -> Bound:
        """What the rule preserves; ``bound.lossless == lossless``."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a draft; row i of p is the target distribution at node i."""


@runtime_checkable
class UsesRawLogits(Protocol):
    """A verifier that may need the target's raw logits in addition to the distributions."""

    def with_raw_logits(self, logits_BNV: Tensor) -> Verifier:
        """The rule for a round in which the target has these raw logits at the draft's nodes."""
