"""Hybrid drafts: in every round each row takes the draft of one of several sources.

The source is the first in a fixed order that has a draft (``Order``), or the one with the largest
expected speed-up (``Bandit``). Copies cost nothing to draft and may be long, where the output
repeats earlier tokens; a model drafts everywhere. Saxena, 2023 (prompt lookup) and Oliaro et al.,
NeurIPS 2025 (suffix decoding, section 4.3) fall back on a model where nothing matches, by a fixed
order or a score. ``benchmarks/plans/hybrid.toml`` measures the gain.

    1. Free sources (chosen drafts at no cost) propose for every row.
    2. Each row picks a source by its past outcomes and by the lengths of the free drafts.
    3. Costly sources propose only if some row picked them.

The pick depends on the past and on drafts that are functions of the committed tokens, never on a
token that was drawn and then discarded. So a round is an unbiased round of the picked source, and a
rule that preserves the target's distribution there does so here. Beside drawn tokens a copied x
counts as a draw from the point mass at x: it is accepted with probability p(x), and a rejection
leaves p without x. That holds for rejection sampling and for block verification.

That also holds for ``Distinct``, since a copy has no siblings.

A model that any row of a batch picked runs for all rows, and drafts nothing in the others.

Reads the device twice per round: the lengths of free drafts, and the outcomes of the drafts.

Proposes: i.i.d. chains if some source does, distinct drafts if one does, else chosen ones. Trees
where a row takes a tree.

Legend: B rows, N nodes (node 0 is the root), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    ReviewsTokens,
    StartsLate,
    Stream,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.sources.sources import (
    NO_SOURCE,
    Choice,
    MultiSourceDrafter,
    Outcome,
    Source,
    SourcesState,
)


class Order:
    """Picks the first source whose draft is long enough.

    Args:
        least: by source, the length from which on a draft is taken.

    Raises:
        InvalidParameterError: fewer than 1.
    """

    def __init__(self, least: Sequence[int]) -> None:
        if any(n < 1 for n in least):
            raise InvalidParameterError(f"least={list(least)}: a draft has 1 or more tokens")
        self.least = tuple(least)

    def start(self, context: Context) -> list[None]:
        return [None] * context.num_rows

    def pick(self, memory: None, lengths: Sequence[int]) -> int:
        pairs = zip(lengths, self.least, strict=True)
        return next((s for s, (length, least) in enumerate(pairs) if length >= least), NO_SOURCE)

    def learn(self, memory: None, outcomes: Sequence[Outcome]) -> None:
        """Does nothing: the order is fixed."""


class Hybrid(MultiSourceDrafter):
    """Proposes one source's draft per row and round.

    Args:
        sources: the sources, in order.
        choice: how rows pick one, such as ``Order`` or ``Bandit``.
        num_tokens: width of the target's logits.

    Raises:
        InvalidParameterError: no sources.
        IncompatibleError: sources that draw in different ways, or two that draft trees.
    """

    def __init__(self, sources: Sequence[Source], choice: Choice, num_tokens: int) -> None:
        super().__init__(sources, choice)
        self.num_tokens = num_tokens
        self.drawn: Drawn = _drawn(sources)
        _check_trees(sources)

    @property
    def capabilities(self) -> Capabilities[Any]:
        costly = [source.drafter.capabilities for source in self.sources if not source.free]
        late = bool(costly) and all(able.starts_late for able in costly)
        own = replace(super().capabilities, reviews=self._reviewed is not None, starts_late=late)
        free = [source.free for source in self.sources]
        copies = any(free) and not all(free)
        trees = [able for each in self.sources if (able := each.drafter.capabilities).drafts_trees]
        if not trees:
            return replace(own, drafts_freely=copies)
        return replace(
            own,
            drafts_freely=copies,
            drafts_trees=True,
            drafts_chains=any(not each.drafter.capabilities.drafts_trees for each in self.sources),
            tree_shape=trees[0].tree_shape,
            fused_tree=trees[0].fused_tree,
        )

    def start_late(self, context: Context) -> SourcesState:
        """As ``StartsLate.start_late``; free sources read the prompts."""
        inner = []
        for source in self.sources:
            drafter = source.drafter
            if source.free:
                inner.append(drafter.start(context))
            else:
                assert isinstance(drafter, StartsLate)
                inner.append(drafter.start_late(context))
        return self._state(context, inner)

    @property
    def _reviewed(self) -> int | None:
        """The only source that runs a model, if it can be reviewed."""
        costly = [s for s, source in enumerate(self.sources) if not source.free]
        can = len(costly) == 1 and self.sources[costly[0]].drafter.capabilities.reviews
        return costly[0] if can else None

    def review(
        self, state: SourcesState | None, context: Context, num_tokens: int
    ) -> Tensor | None:
        """As ``ReviewsTokens.review``, of the draft model; copies need none."""
        s = self._reviewed
        assert s is not None
        drafter = self.sources[s].drafter
        assert isinstance(drafter, ReviewsTokens)
        inner = None if state is None else state.inner[s]
        return drafter.review(inner, context, num_tokens)

    def propose(self, state: SourcesState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.drafts = {}
        for s, source in enumerate(self.sources):
            if source.free:
                self._propose(state, s, context, source.budget(budget), rng)
        picks = self._picks(state, context, budget)
        taken = {}
        for s in sorted(set(picks) - {NO_SOURCE}):
            rows_B = torch.tensor([pick == s for pick in picks], device=context.device)
            if s not in state.drafts:
                own_budget = self.sources[s].budget(budget, None if set(picks) == {s} else rows_B)
                self._propose(state, s, context, own_budget, rng)
            taken[s] = (state.drafts[s], rows_B)
        drawn: Drawn = "chosen" if context.distribution.greedy else self.drawn
        if len(set(picks)) == 1 and len(taken) == 1:
            draft = state.drafts[picks[0]]
            if draft.drawn == drawn:
                return draft
        return self._together(context, list(taken.values()), drawn)

    def _picks(self, state: SourcesState, context: Context, budget: Budget) -> list[int]:
        """The source that each row picks."""
        lengths_B = [draft.num_drafted_B for draft in state.drafts.values()]
        if budget.tokens_B is not None:
            lengths_B.append(budget.tokens_B)
        table = torch.stack(lengths_B, 1).tolist() if lengths_B else [[]] * context.num_rows
        picks = []
        for memory, line in zip(state.memory, table, strict=True):
            most = budget.max_tokens if budget.tokens_B is None else line[-1]
            found = dict(zip(state.drafts, line, strict=False))
            others = 0 if budget.free_only else most
            lengths = [found.get(s, min(x.tokens, others)) for s, x in enumerate(self.sources)]
            assert state.choice is not None
            picks.append(state.choice.pick(memory, lengths))
        return picks

    def _together(
        self, context: Context, taken: Sequence[tuple[Draft, Tensor]], drawn: Drawn
    ) -> Draft:
        """One batch of drafts, each row from the draft of the source that it picked."""
        N = max((draft.num_nodes for draft, _ in taken), default=1)
        tokens_BN = context.root_B[:, None].repeat(1, N)
        mask_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
        mask_BN[:, 0] = True
        for draft, rows_B in taken:
            n = draft.num_nodes
            tokens_BN[:, :n] = torch.where(rows_B[:, None], draft.tokens_BN, tokens_BN[:, :n])
            mask_BN[:, :n] = torch.where(rows_B[:, None], draft.mask_BN, mask_BN[:, :n])
        q_BNV = None if drawn == "chosen" else self._distributions(tokens_BN, taken)
        if all(draft.is_chain for draft, _ in taken):
            return Draft.chain(tokens_BN, mask_BN, q_BNV, drawn)
        parents_BN = torch.arange(-1, N - 1, device=tokens_BN.device).repeat(len(tokens_BN), 1)
        for draft, rows_B in taken:
            n = draft.num_nodes
            own_BN = torch.where(rows_B[:, None], draft.parents_BN, parents_BN[:, :n])
            parents_BN[:, :n] = own_BN
        bound = max(draft.walk_length_bound for draft, _ in taken)
        return Draft(tokens_BN, parents_BN, mask_BN, q_BNV, drawn, max_walk_length=bound)

    def _distributions(self, tokens_BN: Tensor, taken: Sequence[tuple[Draft, Tensor]]) -> Tensor:
        """The distributions that the tokens were drawn from, (B, N, V): the source's, or a point
        mass at a copied token."""
        B, N = tokens_BN.shape
        known = [draft.probs_BNV for draft, _ in taken if draft.probs_BNV is not None]
        dtype = known[0].dtype if known else torch.float32
        q_BNV = torch.zeros(B, N, self.num_tokens, dtype=dtype, device=tokens_BN.device)
        q_BNV[:, :-1].scatter_(2, tokens_BN[:, 1:, None], 1.0)
        for draft, rows_B in taken:
            if draft.probs_BNV is not None:
                n = draft.num_nodes
                own_BNV = torch.where(rows_B[:, None, None], draft.probs_BNV, q_BNV[:, :n])
                q_BNV[:, :n] = own_BNV
        return q_BNV


def _drawn(sources: Sequence[Source]) -> Drawn:
    """How the tokens of all sources are drawn; copies are draws of any kind."""
    kinds = sorted({each.drafter.drawn for each in sources} - {"chosen"})
    if len(kinds) > 1:
        raise IncompatibleError(
            f"sources that draw in different ways ({', '.join(kinds)}) have no rule in common: "
            f"give one kind, beside sources that choose their tokens"
        )
    return kinds[0] if kinds else "chosen"


def _check_trees(sources: Sequence[Source]) -> None:
    names = [
        type(each.drafter).__name__ for each in sources if each.drafter.capabilities.drafts_trees
    ]
    if len(names) > 1:
        raise IncompatibleError(
            f"{' and '.join(names)} both draft trees, and programs verify one shape: give one of "
            f"them, or merge their trees with Merged"
        )
