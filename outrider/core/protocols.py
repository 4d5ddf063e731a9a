"""The interfaces of models, drafters and verifiers.

A round is four verbs: a drafter *proposes*, the target *scores*, a verifier *verifies*, and
everybody *commits*. ``keep`` and ``join`` are how rows leave and enter a running batch; every
per-batch state has them. What a model remembers of a batch is a :class:`SequenceState`.

Legend: B rows, N nodes, D depth, M scored positions, V vocabulary, H hidden width.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from outrider.core.bound import Bound
from outrider.core.capabilities import Capabilities
from outrider.core.context import Context
from outrider.core.draft import Acceptance, Draft, Drawn, Scores, Verdict
from outrider.core.lengths import Lengths
from outrider.core.rng import Stream


class State(Protocol):
    """What a model or a drafter remembers of a batch."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; ``rows[i] >= i``. Called before the context keeps its
        rows. A batch ends with no rows left."""


@runtime_checkable
class CanRollBack(Protocol):
    """A per-batch state that can forget tokens."""

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row; a row that has fewer keeps what
        it has. Called before the context changes; the state reads anew what the context has after
        these tokens later."""


class SequenceState(CanRollBack, State, Protocol):
    """What a model remembers of a batch's tokens: a KV cache, or the hidden state of a recurrent
    model. It owns the lengths of its sequences: nobody else writes them, and they are right after
    each verb.

    A forward pass runs over query tokens after the sequences and changes no length.
    ``append`` or ``select`` then say which of these the sequences keep.
    """

    @property
    def sequence_lengths(self) -> Lengths:
        """Tokens per row."""

    @property
    def cuts_back(self) -> bool:
        """Whether rolling back costs nothing. A recurrent state reads its tokens again instead."""

    def append(self, num: Lengths | int) -> None:
        """Keeps the next ``num`` query tokens of the last forward pass, per row or in all rows."""

    def select(self, index_BD: Tensor, num_accepted: Lengths) -> None:
        """Keeps the root and the accepted path of the tree that the last forward pass ran over.

        Args:
            index_BD: the query tokens of the path, from the root's child downwards; the root is
                number 0.
            num_accepted: how many of them each row keeps.
        """

    def join(self, other: Any) -> None:
        """Appends the rows of another state of the same kind."""

    def snapshot(self) -> Any:
        """A value that :meth:`restore` returns to. Valid while the sequences only grow and the
        batch has the same rows."""

    def restore(self, snapshot: Any) -> None:
        """Makes the sequences what they were when the snapshot was taken."""


@dataclass(frozen=True)
class Budget:
    """How many tokens may be drafted this round along any one path, i.e. the depth of the tree.

    A round emits at most one token more than that. The drafter decides how many nodes a tree has.

    Attributes:
        max_tokens: the largest budget of any row.
        tokens_B: the budget of each row; None if all rows have ``max_tokens``.
        free_only: whether drafters of several sources leave out those that run a model; of no
            effect on others.
    """

    max_tokens: int
    tokens_B: Tensor | None = None
    free_only: bool = False


Needs = Literal["distribution", "argmax", "logits"]
"""What a verifier reads: the target distributions; anything with the same argmax; or the target's
logits before temperature and truncation (for rules at temperature 0 that use more than the
argmax). For the last two, no distribution is computed."""

S = TypeVar("S", bound=State)

ReadHidden = Callable[[Tensor, int], None]
"""Takes the hidden states (B, N, H) that a prefill computes in one forward pass, and the number of
the first of these N tokens."""


class Model(Protocol[S]):
    """A model that scores trees of tokens and can roll back: the target of a round."""

    def start(self, context: Context) -> S:
        """Processes every token of the context except the last, and returns the cache."""

    def score(self, cache: S, draft: Draft) -> Scores:
        """One forward pass over all nodes; caches them after the committed tokens."""

    def commit(self, cache: S, draft: Draft, verdict: Acceptance) -> None:
        """Keeps the root and the accepted path, forgets the other nodes. Mutates the cache; called
        before the context appends the emitted tokens."""

    def join(self, cache: S, other: S) -> None:
        """Appends the rows of another cache. Mutates the first cache."""


class Drafter(Protocol[S]):
    """A source of drafts. It holds the weights; everything about a batch lives in its state."""

    @property
    def drawn(self) -> Drawn:
        """How the siblings that it proposes are obtained."""

    @property
    def capabilities(self) -> Capabilities[Any]:
        """What it can do and what it needs."""

    def start(self, context: Context) -> S:
        """The state for a batch of rows."""

    def propose(self, state: S, context: Context, budget: Budget, rng: Stream) -> Draft:
        """A draft rooted at the context's last token, at most ``budget`` tokens deep."""

    def commit(self, state: S, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Learns what was accepted. Mutates the state; called before the context appends the
        emitted tokens."""

    def join(self, state: S, other: S) -> None:
        """Appends the rows of another state. Mutates the first state."""


class SharesHiddenStates(Protocol):
    """A model whose prefill hands out the hidden states of the prompts."""

    def start(self, context: Context, read: ReadHidden) -> Any:
        """As ``Model.start``; ``read`` is called with the hidden states, in the order of the
        tokens."""


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter that reads the target's hidden states: of the draft's nodes in ``commit``, and of
    the prompts here. It declares ``Capabilities.hidden_layers``, and ``start`` is called before
    the target's prefill."""

    def read_prompt(self, state: Any, context: Context, hidden_BNH: Tensor, first: int) -> None:
        """Takes hidden states of the prompts; called once per forward pass of the target's prefill,
        in order, before the first ``propose``. Rows may leave between two calls. Mutates the state.

        Args:
            state: the state of the batch, which ``start`` returned.
            context: the batch, as ``start`` got it.
            hidden_BNH: of tokens ``first`` to ``first + N`` of each row. Those from a row's last
                token (the root) onwards are arbitrary.
            first: the number of the first token.
        """


REVIEW_WIDTH = 24
"""Most tokens of each row that a model reads in a review which leaves its state alone."""


@runtime_checkable
class ReviewsTokens(Protocol):
    """A drafter whose model can be compared with tokens that the target emitted without a draft. It
    declares ``Capabilities.reviews``."""

    def review(self, state: Any | None, context: Context, num_tokens: int) -> Tensor | None:
        """How probable the model finds the newest tokens of each row: q_i(x_i) of the last
        ``num_tokens`` committed ones, (B, K), under the rows' sampling parameters; at temperature 0
        whether x_i is its argmax. The model reads what it lacks ahead of the root, and the state is
        mutated. Without a state it reads the ``REVIEW_WIDTH`` newest tokens alone, which takes as
        long however much it lacks; what it makes of them is then an estimate. None, and nothing is
        read, where it cannot be told.

        Args:
            state: the drafter's, of rows that have not drafted for so many tokens; or None.
            context: the running batch.
            num_tokens: K, at least 1 and less than the tokens of any row.
        """


@runtime_checkable
class StartsLate(Protocol):
    """A drafter whose model may read the prompts when it first drafts. It declares
    ``Capabilities.starts_late``."""

    def start_late(self, context: Context) -> Any:
        """As ``Drafter.start``, but no forward pass is run."""


@runtime_checkable
class RemembersOutputs(Protocol):
    """A drafter that copies from the outputs of requests that have ended."""

    def forget_outputs(self) -> None:
        """Drops these outputs. No request may be running."""


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


NodeDistributions = Callable[[Tensor], Tensor]
"""From one node of each row, (B,), to the target's distributions there, (B, V)."""


class ReadsNodes(Protocol):
    """A verifier that reads the target's distributions at some nodes of a tree only. Compiled
    programs compute no others where that pays."""

    def verify_at(self, draft: Draft, p_at: NodeDistributions, rng: Stream) -> Verdict:
        """As ``__call__``, from distributions that are computed when they are asked for."""


class ChecksDrafts(Protocol):
    """A verifier that is valid for some shapes of trees only."""

    def check_draft(self, draft: Draft) -> None:
        """Reads the draft's shape on the host. Compiled programs of the rule, which read nothing,
        run after it.

        Raises:
            IncompatibleError: the rule would bias the output of this draft.
        """
