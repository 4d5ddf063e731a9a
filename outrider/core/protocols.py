"""The interfaces that everything plugs into.

A round is four verbs: a drafter *proposes*, the target *scores*, a verifier *verifies*, and
everybody *commits*. ``keep`` and ``join`` are how rows leave and enter a running batch; every
per-batch state has them.

Legend: B rows, N nodes, M scored places, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from outrider.core.bound import Bound
from outrider.core.capabilities import Capabilities
from outrider.core.draft import Draft, Drawn, Verdict
from outrider.core.rng import Stream

if TYPE_CHECKING:
    from outrider.core.context import Context, Prefix


class Distribution(Protocol):
    """How a batch's rows turn logits into the distribution that is sampled from."""

    @property
    def greedy(self) -> bool:
        """Whether every row takes the argmax; then no probabilities are needed at all."""

    def logits(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """Logits after bias, penalties and processors, at least float32, shape (B, M, V)."""

    def __call__(self, logits_BMV: Tensor, prefix: Prefix) -> Tensor:
        """The normalised distribution at every place, shape (B, M, V)."""


class State(Protocol):
    """What a model or drafter remembers about a batch."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; ``rows[i] >= i``. A batch ends with none left."""


@dataclass(frozen=True)
class Scores:
    """A target pass over a draft: logits_BNV, and the last hidden states if asked for."""

    logits_BNV: Tensor
    hidden_BNH: Tensor | None = None


@dataclass(frozen=True)
class Budget:
    """How many tokens may be drafted this round, along any one path: the depth of a tree.

    A round emits at most one token more. How many nodes a tree has is its drafter's own business.

    Attributes:
        max_tokens: the largest number of any row.
        tokens_B: the number of each row; None when all rows have ``max_tokens``.
    """

    max_tokens: int
    tokens_B: Tensor | None = None


Needs = Literal["distribution", "argmax", "logits"]
"""What a verifier reads: the target's distributions; anything that has their argmax; or the
target's logits before temperature and truncation (rules for temperature 0 that look at more than
the argmax). For the last two no distribution is computed."""

S = TypeVar("S", bound=State)


class Model(Protocol[S]):
    """A model that scores trees and can forget: the target of a round."""

    def start(self, context: Context) -> S:
        """Caches every token of the context but the last."""

    def score(self, cache: S, draft: Draft) -> Scores:
        """One pass over all nodes; writes them behind the committed tokens."""

    def commit(self, cache: S, draft: Draft, verdict: Verdict) -> None:
        """Keeps the root and the accepted path, forgets the other nodes. Mutates the cache."""

    def join(self, cache: S, other: S) -> None:
        """Appends the rows of another cache. Mutates the first."""


class Drafter(Protocol[S]):
    """A source of drafts. Holds weights; what it knows of a batch lives in its state."""

    @property
    def drawn(self) -> Drawn:
        """How the siblings it proposes come about."""

    @property
    def capabilities(self) -> Capabilities[Any]:
        """What it can do and what it needs."""

    def start(self, context: Context) -> S:
        """State for a batch of rows."""

    def propose(self, state: S, context: Context, budget: Budget, rng: Stream) -> Draft:
        """A draft that continues the context's last token, at most ``budget`` tokens deep."""

    def commit(self, state: S, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Learns what was accepted. Mutates the state."""

    def join(self, state: S, other: S) -> None:
        """Appends the rows of another state. Mutates the first."""


class Verifier(Protocol):
    """A rule that turns a draft and the target's distributions into tokens."""

    @property
    def lossless(self) -> bool:
        """Whether what it emits has exactly the target's distribution."""

    @property
    def accepts(self) -> AbstractSet[Drawn]:
        """Which drafts it can verify; any other would be silently wrong."""

    @property
    def needs(self) -> Needs:
        """What it reads as ``p_BNV``."""

    @property
    def bound(self) -> Bound:
        """What it preserves; ``bound.lossless == lossless``."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a draft; row i of p is the target's distribution at node i."""


@runtime_checkable
class ReadsLogits(Protocol):
    """A verifier that may want the target's raw logits besides the distributions it is given."""

    def reading(self, logits_BNV: Tensor) -> Verifier:
        """The rule for a round in which the target has these logits at the draft's nodes."""
