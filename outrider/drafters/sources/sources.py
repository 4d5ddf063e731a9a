"""Several sources of drafts: shared by drafters that pick one of them or merge them.

Each source drafts with a length of its own. Once the round is committed, every draft, taken or not,
is compared with the committed tokens: its *agreement* is the number of its leading tokens that were
committed as well. Choices learn from the agreements, and a model, whose cache holds the tokens that
it drafted, forgets all others.

So a source must read the committed tokens from the context, as drafters over a model and lookups
do, not from the verdicts alone: tokens of other sources are committed as well.

Reads the device once per round for the agreements.

Legend: B rows, N nodes (node 0 is the root), D depth of a chain (N-1), T context length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drafter, Scores, Stream, Verdict
from outrider.core.errors import IncompatibleError, InvalidParameterError

NO_SOURCE = -1
"""Stands for a source's number where a row picks none."""

Outcome = tuple[int, int]
"""Of a draft, how many of its tokens were committed, and how many were verified: one more where the
committed tokens differ from the draft."""


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
        drafter: a drafter of ``iid`` or ``chosen`` candidates.
        tokens: most tokens of its drafts.
        cost: cost of a drafted token in target passes.

    Raises:
        InvalidParameterError: ``tokens`` below 1, a negative or infinite cost.
        IncompatibleError: a drafter of ``distinct`` or ``searched`` candidates.
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
        """Whether its draft may be read before a source is picked: it costs nothing and is a
        function of the committed tokens. A pick that depended on drawn tokens would bias the
        output."""
        return self.cost == 0 and self.drafter.drawn == "chosen"

    def budget(self, budget: Budget, rows_B: Tensor | None = None) -> Budget:
        """The budget of its draft; with ``rows_B`` nothing is drafted in the other rows."""
        most = min(self.tokens, budget.max_tokens)
        tokens_B = None if budget.tokens_B is None else budget.tokens_B.clamp(max=most)
        if rows_B is None:
            return Budget(most, tokens_B)
        return Budget(most, torch.where(rows_B, most if tokens_B is None else tokens_B, 0))


@dataclass
class SourcesState:
    """The states of the sources, and the last round's drafts until they have been compared with
    the committed tokens.

    Attributes:
        context: the running batch.
        inner: the state of each source.
        rewinds: whether each source can forget what it drafted.
        choice: how rows pick a source; None if they do not.
        memory: the choice's memory of each row.
        drafts: the drafts of the last round, by the number of their source.
        root_B: context lengths when the drafts were made.
        roots: ``root_B`` on the host.
    """

    context: Context
    inner: list[Any]
    rewinds: list[bool]
    choice: Choice | None
    memory: list[Any]
    drafts: dict[int, Draft] = field(default_factory=dict)
    root_B: Tensor = field(default_factory=lambda: torch.zeros(0))
    roots: list[int] = field(default_factory=list)

    def settle(self) -> None:
        """Compares the last drafts with the committed tokens: choices learn, and models forget
        drafted tokens that were not committed."""
        if not self.drafts:
            return
        drafts, self.drafts = self.drafts, {}
        verified = {s: agreement(draft, self.context, self.root_B) for s, draft in drafts.items()}
        table = torch.stack([n for pair in verified.values() for n in pair]).tolist()
        outcomes = {s: (table[2 * i], table[2 * i + 1]) for i, s in enumerate(drafts)}
        for s, (agreed, _) in outcomes.items():
            if self.rewinds[s]:
                lengths = [root + n for root, n in zip(self.roots, agreed, strict=True)]
                self.inner[s].rewind(self.root_B + verified[s][0], lengths)
        if self.choice is None or self.context.lengths == self.roots:  # the round was not committed
            return
        each = [outcomes.get(s) for s in range(len(self.inner))]
        for row, memory in enumerate(self.memory):
            self.choice.learn(memory, [(n[0][row], n[1][row]) if n else (0, 0) for n in each])

    def keep(self, rows: Sequence[int]) -> None:
        self.settle()
        for inner in self.inner:
            inner.keep(rows)
        self.memory = [self.memory[row] for row in rows]


class MultiSourceDrafter:
    """A drafter over several sources.

    Args:
        sources: the sources, in order.
        choice: how rows pick one; None if they do not.

    Raises:
        InvalidParameterError: no sources.
    """

    def __init__(self, sources: Sequence[Source], choice: Choice | None) -> None:
        if not sources:
            raise InvalidParameterError("sources=[]: give one or more")
        self.sources = tuple(sources)
        self.choice = choice

    @property
    def capabilities(self) -> Capabilities[Any]:
        """The sources' capabilities combined, for one source's chain per row."""
        each = [source.drafter.capabilities for source in self.sources]
        return Capabilities(
            tuple(model for able in each for model in able.models),
            depth=max(source.tokens for source in self.sources),
            max_nodes=lambda num_tokens: max(self._nodes(num_tokens)),
            runs_trees=any(able.runs_trees for able in each),
            handles_context_limit=all(able.handles_context_limit for able in each if able.models),
        )

    def start(self, context: Context) -> SourcesState:
        """State for a batch of rows.

        Raises:
            IncompatibleError: a costly or drawing source that cannot forget what it drafted.
        """
        for each in self.sources:
            if not each.free and not each.drafter.capabilities.rewindable:
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} cannot forget tokens that it drafted and "
                    f"another source's draft replaced: its state needs a method rewind"
                )
        inner = [each.drafter.start(context) for each in self.sources]
        rewinds = [each.drafter.capabilities.rewindable for each in self.sources]
        memory = [None] * context.num_rows if self.choice is None else self.choice.start(context)
        return SourcesState(context, inner, rewinds, self.choice, memory)

    def commit(self, state: SourcesState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Commits the sources' own drafts; they read the committed tokens in the next round."""
        for s, own in state.drafts.items():
            self.sources[s].drafter.commit(state.inner[s], own, verdict, scores)

    def join(self, state: SourcesState, other: SourcesState) -> None:
        state.settle()
        other.settle()
        for each, mine, theirs in zip(self.sources, state.inner, other.inner, strict=True):
            each.drafter.join(mine, theirs)
        state.memory = state.memory + other.memory

    def _nodes(self, num_tokens: int) -> list[int]:
        """The most nodes of each source's drafts."""
        return [
            source.drafter.capabilities.max_nodes(min(source.tokens, num_tokens))
            for source in self.sources
        ]

    def _begin(self, state: SourcesState, context: Context) -> None:
        state.settle()
        state.root_B, state.roots = context.length_B, list(context.lengths)

    def _propose(
        self, state: SourcesState, s: int, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        """One source's draft, kept until it has been compared with the committed tokens."""
        draft = self.sources[s].drafter.propose(state.inner[s], context, budget, rng)
        state.drafts[s] = draft
        return draft


def agreement(draft: Draft, context: Context, root_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of a chain were committed, and how many were verified, each (B,); zeros for a
    tree, of which no caller needs them.

    Args:
        draft: the draft.
        context: the batch after the round.
        root_B: the lengths of its rows when the draft was made.
    """
    if not draft.is_chain:
        return torch.zeros_like(root_B), torch.zeros_like(root_B)
    D = draft.num_nodes - 1
    position_BD = root_B[:, None] + torch.arange(D, device=root_B.device)
    known_BD = draft.mask_BN[:, 1:] & (position_BD < context.length_B[:, None])
    last = context.tokens_BT.shape[1] - 1
    committed_BD = context.tokens_BT.gather(1, position_BD.clamp(max=last))
    agrees_BD = known_BD & (committed_BD == draft.tokens_BN[:, 1:])
    agreed_B = agrees_BD.long().cumprod(1).sum(1)
    return agreed_B, torch.minimum(agreed_B + 1, known_BD.sum(1))
