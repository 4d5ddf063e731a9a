"""Several sources of drafts at once: what drafters that choose among them or merge them share.

A source is asked with a draft length of its own. What a round emits then tells of every draft,
taken or not, how far it was right: its *agreement*, the number of its leading tokens that were
emitted. A choice learns from it, and a source whose cache holds its own drafted tokens forgets the
others.

So a source must read what was committed from the context, as drafters over a model and lookups do,
and not from verdicts alone: the tokens of other sources are committed as well.

Reads the device once per round for the agreements.

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1), T context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    CanRollBack,
    Context,
    Draft,
    Drafter,
    Lengths,
    Scores,
    Stream,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.runtime import HFModel

NOBODY = -1
"""In place of a source's number."""

Outcome = tuple[int, int]
"""Of a draft, how many of its tokens were emitted, and how many were verified: one more where the
emitted tokens differ from the draft."""


class Choice(Protocol):
    """How a row chooses among sources; whatever it remembers of the row is the row's memory."""

    def start(self, context: Context) -> list[Any]:
        """A memory per row."""

    def pick(self, memory: Any, lengths: Sequence[int]) -> int:
        """The number of a source, or NOBODY, given how long each one's draft would be."""

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> None:
        """Learns the outcome of each source's draft; (0, 0) where a source was not asked. Mutates
        the memory."""


@dataclass(frozen=True)
class Source:
    """Where drafts may come from.

    Attributes:
        drafter: of chains; not ``distinct`` or ``searched`` ones.
        tokens: most tokens it is asked for.
        cost: of a token, in forward passes of the target.

    Raises:
        InvalidParameterError: no tokens, a negative or infinite cost.
        IncompatibleError: a drafter of another kind.
    """

    drafter: Drafter[Any]
    tokens: int
    cost: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidParameterError(f"tokens={self.tokens!r}: a source drafts 1 or more")
        if not 0 <= self.cost < float("inf"):
            raise InvalidParameterError(f"cost={self.cost!r}: must be a finite number from 0 up")
        if self.drafter.drawn not in ("iid", "chosen"):
            raise IncompatibleError(
                f"{type(self.drafter).__name__} drafts {self.drafter.drawn!r} candidates, which "
                f"cannot stand beside those of other sources: give sources that draw chains or "
                f"choose them"
            )

    @property
    def free(self) -> bool:
        """Whether a choice may depend on its draft, which costs nothing and is a function of the
        context. A drawn draft is not: a choice that depends on it would bias the output."""
        return self.cost == 0 and self.drafter.drawn == "chosen"

    def budget(self, budget: Budget, rows_B: Tensor | None = None) -> Budget:
        """The budget that it is asked with: nothing in other rows than ``rows_B``, if given."""
        most = min(self.tokens, budget.max_tokens)
        tokens_B = None if budget.tokens_B is None else budget.tokens_B.clamp(max=most)
        if rows_B is None:
            return Budget(most, tokens_B)
        return Budget(most, torch.where(rows_B, most if tokens_B is None else tokens_B, 0))


@dataclass
class SourcesState:
    """What the sources know of a batch, and the drafts of the round under way.

    Attributes:
        context: the running batch.
        inner: the state of each source.
        choice: how rows choose; None if they do not.
        memory: what the choice remembers of each row.
        asked: drafts of the round by the number of their source.
    """

    context: Context
    inner: list[Any]
    choice: Choice | None
    memory: list[Any]
    asked: dict[int, Draft] = field(default_factory=dict)

    def keep(self, rows: Sequence[int]) -> None:
        for inner in self.inner:
            inner.keep(rows)
        self.memory = [self.memory[row] for row in rows]

    def learn(self, outcomes: dict[int, list[Outcome]]) -> None:
        """Tells every row's memory the outcomes of the drafts, by the number of their source."""
        if self.choice is None:
            return
        for row, memory in enumerate(self.memory):
            each = [outcomes[s][row] if s in outcomes else (0, 0) for s in range(len(self.inner))]
            self.choice.learn(memory, each)


class MultiSourceDrafter:
    """Sources, all asked about one batch.

    Args:
        sources: in order.
        choice: how rows choose, if they do.

    Raises:
        InvalidParameterError: no sources.
    """

    def __init__(self, sources: Sequence[Source], choice: Choice | None) -> None:
        if not sources:
            raise InvalidParameterError("sources=[]: give one or more")
        self.sources = tuple(sources)
        self.choice = choice

    @property
    def models(self) -> tuple[HFModel, ...]:
        """The models they run, for their clocks, their health and their limits."""
        return tuple(m for each in self.sources for m in getattr(each.drafter, "models", ()))

    @property
    def heeds_context(self) -> bool:
        """Whether every source with a model stops where that model's context is full."""
        modelled = [each.drafter for each in self.sources if getattr(each.drafter, "models", ())]
        return all(getattr(drafter, "heeds_context", False) for drafter in modelled)

    @property
    def depth(self) -> int:
        """The longest draft that there can be."""
        return max(each.tokens for each in self.sources)

    def start(self, context: Context) -> SourcesState:
        """State for a batch of rows.

        Raises:
            IncompatibleError: a source that cannot forget what it drafted.
        """
        inner = [each.drafter.start(context) for each in self.sources]
        for each, state in zip(self.sources, inner, strict=True):
            if not each.free and not isinstance(state, CanRollBack):
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} cannot forget tokens that it drafted and "
                    f"another source's draft replaced: its state needs a method rollback"
                )
        memory = [None] * context.num_rows if self.choice is None else self.choice.start(context)
        return SourcesState(context, inner, self.choice, memory)

    def commit(
        self, state: SourcesState, draft: Draft, verdict: Acceptance, scores: Scores
    ) -> None:
        """Lets the sources that were asked commit; then they forget, and the rows learn, by what
        was emitted, whichever source it came from."""
        asked, state.asked = state.asked, {}
        if not asked:
            return
        emitted_BK = verdict.emitted(draft)
        verified = [agreement(own, emitted_BK, verdict.num_emitted_B) for own in asked.values()]
        table = torch.stack([count_B for pair in verified for count_B in pair]).tolist()
        outcomes = {}
        for i, (s, own) in enumerate(asked.items()):
            agreed, checked = table[2 * i : 2 * i + 2]
            outcomes[s] = list(zip(agreed, checked, strict=True))
            self.sources[s].drafter.commit(state.inner[s], own, verdict, scores)
            if isinstance(state.inner[s], CanRollBack):
                kept = Lengths(agreed, verified[i][0])
                state.inner[s].rollback(state.context.sequence_lengths + kept)
        state.learn(outcomes)

    def join(self, state: SourcesState, other: SourcesState) -> None:
        for each, mine, theirs in zip(self.sources, state.inner, other.inner, strict=True):
            each.drafter.join(mine, theirs)
        state.memory = state.memory + other.memory

    def _ask(
        self, state: SourcesState, s: int, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        """One source's draft, remembered until the round is committed."""
        draft = self.sources[s].drafter.propose(state.inner[s], context, budget, rng)
        state.asked[s] = draft
        return draft


def agreement(draft: Draft, emitted_BK: Tensor, num_emitted_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of a chain were emitted, and how many were verified, each (B,).

    Of a tree, for which nobody needs the numbers, none.

    Args:
        draft: what was drafted.
        emitted_BK: the tokens of the round; row b emitted its first ``num_emitted_B``.
    """
    if not draft.is_chain:
        return torch.zeros_like(num_emitted_B), torch.zeros_like(num_emitted_B)
    D = min(draft.num_nodes - 1, emitted_BK.shape[1])
    known_BD = draft.mask_BN[:, 1 : D + 1] & (
        torch.arange(D, device=emitted_BK.device) < num_emitted_B[:, None]
    )
    agrees_BD = known_BD & (emitted_BK[:, :D] == draft.tokens_BN[:, 1 : D + 1])
    agreed_B = agrees_BD.long().cumprod(1).sum(1)
    return agreed_B, torch.minimum(agreed_B + 1, known_BD.sum(1))
