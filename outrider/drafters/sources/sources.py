"""Several sources of drafts at once: what drafters that choose among them or merge them share.

A source is asked with a draft length of its own. Afterwards the text tells of every draft, taken or
not, how far it was right: its *agreement*, the tokens from its first on that the text has as well.
A rule learns from it; and a model, whose cache holds its own drafted tokens, forgets all but those.

So a source must read what was committed from the context, as drafters over a model and lookups do,
not from the verdicts alone: other sources' tokens come into the text as well.

Reads the device once per round for the agreements.

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1), T context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drafter, Scores, Stream, Verdict
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.chain.staged import Rewindable
from outrider.runtime import HFModel

NOBODY = -1
"""In place of a source's number."""

Outcome = tuple[int, int]
"""Of a draft, how many tokens the text has as well, and how many of them it has verified: one more
where it parts from the draft."""


class Choice(Protocol):
    """How a row chooses among sources; whatever it remembers of the row is the row's memory."""

    def start(self, context: Context) -> list[Any]:
        """A memory per row."""

    def pick(self, memory: Any, lengths: Sequence[int]) -> int:
        """The number of a source, or NOBODY, given how long each one's draft would be."""

    def learn(self, memory: Any, outcomes: Sequence[Outcome]) -> None:
        """What came of each one's draft; (0, 0) where it was not asked. Mutates the memory."""


@dataclass(frozen=True)
class Source:
    """Where drafts may come from.

    Attributes:
        drafter: of chains; not ``distinct`` or ``searched`` ones.
        tokens: most tokens it is asked for.
        cost: of a token, in passes of the target.

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
        """Whether its draft may be looked at before a source is chosen: it costs nothing, and is a
        function of the text. A drawn one is not: a choice that heeds it would bias the text."""
        return self.cost == 0 and self.drafter.drawn == "chosen"

    def budget(self, budget: Budget, rows_B: Tensor | None = None) -> Budget:
        """What it is asked for; nothing in other rows than these."""
        most = min(self.tokens, budget.max_tokens)
        tokens_B = None if budget.tokens_B is None else budget.tokens_B.clamp(max=most)
        if rows_B is None:
            return Budget(most, tokens_B)
        return Budget(most, torch.where(rows_B, most if tokens_B is None else tokens_B, 0))


@dataclass
class SourcesState:
    """What the sources know of a batch, and the last round's drafts until the text has verified
    them.

    Attributes:
        context: the running batch.
        inner: the state of each source.
        choice: how rows choose; None if they do not.
        memory: of each row.
        asked: drafts of the last round by the number of their source.
        root_B: context lengths when they were made.
        roots: the same on the host.
    """

    context: Context
    inner: list[Any]
    choice: Choice | None
    memory: list[Any]
    asked: dict[int, Draft] = field(default_factory=dict)
    root_B: Tensor = field(default_factory=lambda: torch.zeros(0))
    roots: list[int] = field(default_factory=list)

    def settle(self) -> None:
        """Holds the last drafts against the text: rows learn, models forget what is not in it."""
        if not self.asked:
            return
        asked, self.asked = self.asked, {}
        verified = {s: agreement(draft, self.context, self.root_B) for s, draft in asked.items()}
        table = torch.stack([n for pair in verified.values() for n in pair]).tolist()
        outcomes = {s: (table[2 * i], table[2 * i + 1]) for i, s in enumerate(asked)}
        for s, (agreed, _) in outcomes.items():
            if isinstance(self.inner[s], Rewindable):
                lengths = [root + n for root, n in zip(self.roots, agreed, strict=True)]
                self.inner[s].rewind(self.root_B + verified[s][0], lengths)
        if self.choice is None or self.context.lengths == self.roots:  # never committed
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
            if not each.free and not isinstance(state, Rewindable):
                raise IncompatibleError(
                    f"{type(each.drafter).__name__} cannot forget tokens that it drafted and "
                    f"another source's draft replaced: its state needs a method rewind"
                )
        memory = [None] * context.num_rows if self.choice is None else self.choice.start(context)
        return SourcesState(context, inner, self.choice, memory)

    def commit(self, state: SourcesState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Tells those that were asked; what the text is, the next round tells them."""
        for s, own in state.asked.items():
            self.sources[s].drafter.commit(state.inner[s], own, verdict, scores)

    def join(self, state: SourcesState, other: SourcesState) -> None:
        state.settle()
        other.settle()
        for each, mine, theirs in zip(self.sources, state.inner, other.inner, strict=True):
            each.drafter.join(mine, theirs)
        state.memory = state.memory + other.memory

    def _begin(self, state: SourcesState, context: Context) -> None:
        state.settle()
        state.root_B, state.roots = context.length_B, list(context.lengths)

    def _ask(
        self, state: SourcesState, s: int, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        """One source's draft, remembered until the text has verified it."""
        draft = self.sources[s].drafter.propose(state.inner[s], context, budget, rng)
        state.asked[s] = draft
        return draft


def agreement(draft: Draft, context: Context, root_B: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of a chain the text has as well, and how many it has verified, each (B,).

    Of a tree, which nobody needs it for, none.

    Args:
        draft: what was drafted.
        context: the text as it is now.
        root_B: its lengths when the draft was made.
    """
    if not draft.is_chain:
        return torch.zeros_like(root_B), torch.zeros_like(root_B)
    D = draft.num_nodes - 1
    place_BD = root_B[:, None] + torch.arange(D, device=root_B.device)
    known_BD = draft.mask_BN[:, 1:] & (place_BD < context.length_B[:, None])
    text_BD = context.tokens_BT.gather(1, place_BD.clamp(max=context.tokens_BT.shape[1] - 1))
    agrees_BD = known_BD & (text_BD == draft.tokens_BN[:, 1:])
    agreed_B = agrees_BD.long().cumprod(1).sum(1)
    return agreed_B, torch.minimum(agreed_B + 1, known_BD.sum(1))
