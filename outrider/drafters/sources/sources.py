"""Several sources of drafts: shared by drafters that pick one of them or merge them.

Each source drafts with a length of its own. When the round is committed, every draft, taken or not,
is compared with the emitted tokens: its *agreement* is the number of its leading tokens that were
emitted as well. Choices learn from the agreements, and a model, whose cache holds the tokens that
it drafted, forgets all others.

So a source must read the committed tokens from the context, as drafters over a model and lookups
do, not from the verdicts alone: tokens of other sources are committed as well. A head, which reads
the target's hidden states, takes them from the verdict of every round, whichever source drafted.

Reads the device once per round for the agreements.

Legend: B rows, N nodes (node 0 is the root), D depth of a chain (N-1), T context length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    Lengths,
    Scores,
    Stream,
    prompt_reader,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.runtime.prefill import Prefilling, begin

NO_SOURCE = -1
"""Stands for a source's number where a row picks none."""

Outcome = tuple[int, int]
"""Of a draft, how many of its tokens were emitted, and how many were verified: one more where the
emitted tokens differ from the draft."""


class Choice(Protocol):
    """How a row picks one of the sources, by a memory that is the row's own."""

    def start(self, context: Context) -> list[Any]:
        """A memory for each row."""

    def pick(self, memory: Any, lengths: Sequence[int]) -> int:
        """The number of a source, or ``NO_SOURCE``, given the draft length of each source."""

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> None:
        """Takes the outcome of each source's draft, (0, 0) if it proposed none. Mutates the
        memory."""


@dataclass(frozen=True)
class Source:
    """A drafter among others.

    Attributes:
        drafter: a drafter of ``iid``, ``distinct`` or ``chosen`` candidates.
        tokens: most tokens of its drafts.
        cost: cost of a drafted token, in forward passes of the target.

    Raises:
        InvalidParameterError: ``tokens`` below 1, a negative or infinite cost.
        IncompatibleError: a drafter of ``searched`` candidates.
    """

    drafter: Drafter[Any]
    tokens: int
    cost: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidParameterError(f"tokens={self.tokens!r}: a source drafts 1 or more")
        if not 0 <= self.cost < float("inf"):
            raise InvalidParameterError(f"cost={self.cost!r}: must be a finite number from 0 up")
        if self.drafter.drawn == "searched":
            raise IncompatibleError(
                f"{type(self.drafter).__name__} drafts {self.drafter.drawn!r} candidates, which "
                f"cannot stand beside those of other sources: give sources that draw their tokens "
                f"or choose them"
            )

    @property
    def free(self) -> bool:
        """Whether its draft may be read before a source is picked: it costs nothing and is a
        function of the committed tokens. A pick that depended on drawn tokens would bias the
        output."""
        return self.cost == 0 and self.drafter.drawn == "chosen"

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it follows the target's hidden states."""
        return bool(self.drafter.capabilities.hidden_layers)

    def budget(self, budget: Budget, rows_B: Tensor | None = None) -> Budget:
        """The budget of its draft; with ``rows_B`` nothing is drafted in the other rows."""
        most = min(self.tokens, budget.max_tokens)
        tokens_B = None if budget.tokens_B is None else budget.tokens_B.clamp(max=most)
        if rows_B is None:
            return Budget(most, tokens_B, budget.free_only)
        return Budget(most, torch.where(rows_B, most if tokens_B is None else tokens_B, 0))


@dataclass
class SourcesState:
    """The states of the sources, and the drafts of the round under way.

    Attributes:
        context: the running batch.
        inner: the state of each source.
        choice: how rows pick a source; None if they do not.
        memory: the choice's memory of each row.
        drafts: the drafts of the round, by the number of their source.
    """

    context: Context
    inner: list[Any]
    choice: Choice | None
    memory: list[Any]
    drafts: dict[int, Draft] = field(default_factory=dict)

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
    """A drafter over several sources.

    Args:
        sources: the sources, in order.
        choice: how rows pick one; None if they do not.

    Raises:
        InvalidParameterError: no sources, or several heads.
    """

    def __init__(self, sources: Sequence[Source], choice: Choice | None) -> None:
        if not sources:
            raise InvalidParameterError("sources=[]: give one or more")
        if sum(source.reads_hidden_states for source in sources) > 1:
            raise InvalidParameterError(
                "several sources read the target's hidden states: give one head at most"
            )
        self.sources = tuple(sources)
        self.choice = choice

    @property
    def capabilities(self) -> Capabilities[Any]:
        """The sources' capabilities combined, for one source's draft per row."""
        each = [source.drafter.capabilities for source in self.sources]
        return Capabilities(
            tuple(model for able in each for model in able.models),
            hidden_layers=tuple(layer for able in each for layer in able.hidden_layers),
            fused_lengths=tuple(length for able in each for length in able.fused_lengths),
            slot_bytes=sum(able.slot_bytes for able in each),
            depth=max(source.tokens for source in self.sources),
            max_nodes=lambda num_tokens: max(self._nodes(num_tokens)),
            runs_trees=any(able.runs_trees for able in each),
            handles_context_limit=all(able.handles_context_limit for able in each if able.models),
        )

    def start(self, context: Context) -> SourcesState:
        """State for a batch of rows; raises as :meth:`begin`."""
        state: SourcesState = self.begin(context).finish()
        return state

    def begin(self, context: Context) -> Prefilling:
        """As :meth:`start`, but the caller runs the forward passes.

        Raises:
            IncompatibleError: a costly or drawing source that cannot forget what it drafted.
        """
        for each in self.sources:
            forgets = each.drafter.capabilities.rewindable or each.reads_hidden_states
            if not each.free and not forgets:
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} cannot forget tokens that it drafted and "
                    f"another source's draft replaced: its state needs a method rollback, and its "
                    f"capabilities must declare it (rewindable=True)"
                )
        inner = [begin(each.drafter, context) for each in self.sources]
        state = self._state(context, [each.state for each in inner])
        return Prefilling(state, [prefill for each in inner for prefill in each.prefills])

    def _state(self, context: Context, inner: list[Any]) -> SourcesState:
        """The state, given those of the sources."""
        memory = [None] * context.num_rows if self.choice is None else self.choice.start(context)
        return SourcesState(context, inner, self.choice, memory)

    def read_prompt(
        self, state: SourcesState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        """Hands the target's hidden states at the next tokens of the prompts to the head."""
        for source, inner in zip(self.sources, state.inner, strict=True):
            if source.reads_hidden_states:
                prompt_reader(source.drafter, inner, context)(hidden_BNH, first)

    def commit(
        self, state: SourcesState, draft: Draft, verdict: Acceptance, scores: Scores
    ) -> None:
        """Commits the sources' own drafts, and to a head the one that was verified. Models then
        forget the drafted tokens that were not emitted, and choices learn, whichever source the
        emitted tokens came from."""
        drafts, state.drafts = state.drafts, {}
        for source, inner in zip(self.sources, state.inner, strict=True):
            if source.reads_hidden_states:
                source.drafter.commit(inner, draft, verdict, scores)
        if not drafts:
            return
        emitted_BK = verdict.emitted(draft)
        verified = [agreement(own, emitted_BK, verdict.num_emitted_B) for own in drafts.values()]
        table = torch.stack([count_B for pair in verified for count_B in pair]).tolist()
        outcomes = {}
        for i, (s, own) in enumerate(drafts.items()):
            agreed, checked = table[2 * i : 2 * i + 2]
            outcomes[s] = list(zip(agreed, checked, strict=True))
            if self.sources[s].reads_hidden_states:
                continue
            self.sources[s].drafter.commit(state.inner[s], own, verdict, scores)
            if self.sources[s].drafter.capabilities.rewindable:
                kept = Lengths(agreed, verified[i][0])
                state.inner[s].rollback(state.context.sequence_lengths + kept)
        state.learn(outcomes)

    def join(self, state: SourcesState, other: SourcesState) -> None:
        for each, mine, theirs in zip(self.sources, state.inner, other.inner, strict=True):
            each.drafter.join(mine, theirs)
        state.memory = state.memory + other.memory

    def _nodes(self, num_tokens: int) -> list[int]:
        """The most nodes of each source's drafts."""
        return [
            source.drafter.capabilities.max_nodes(min(source.tokens, num_tokens))
            for source in self.sources
        ]

    def _propose(
        self, state: SourcesState, s: int, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        """One source's draft, kept until the round is committed."""
        draft = self.sources[s].drafter.propose(state.inner[s], context, budget, rng)
        state.drafts[s] = draft
        return draft


def agreement(draft: Draft, emitted_BK: Tensor, num_emitted_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of a chain were emitted, and how many were verified, each (B,); zeros for a
    tree, of which no caller needs them.

    Args:
        draft: the draft.
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
