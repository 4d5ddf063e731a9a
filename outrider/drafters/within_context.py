"""Wraps a drafter whose models have a shorter context than the target.

The drafter sees only the rows that fit into its models' context, as a batch of their own. A row
that has filled the context leaves that batch and goes on without drafts; what the target emits does
not depend on it.

Legend: B rows of the engine's batch, R rows of the drafter's batch, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Distribution,
    Draft,
    Drafter,
    Drawn,
    Lengths,
    Scores,
    Stream,
    Verdict,
    prompt_reader,
    to_device,
)
from outrider.core.errors import IncompatibleError
from outrider.runtime import HFModel
from outrider.runtime.prefill import Prefilling, begin
from outrider.sampling import Warp


def within_context(drafter: Drafter[Any], target: HFModel) -> Drafter[Any]:
    """The drafter, wrapped if its models' context is shorter than the target's and it does not
    handle that itself.

    Raises:
        IncompatibleError: a context too short for a draft of one token.
    """
    able = drafter.capabilities
    models: tuple[HFModel, ...] = able.models
    for model in models:
        if model.limit < 2:
            raise IncompatibleError(
                f"{model.name} has a context of {model.limit} token, too short to draft even one "
                f"after a prompt: take another draft model, or a method without one"
            )
    limit = min((model.limit for model in models), default=target.limit)
    source_limit = min((model.prompt_limit for model in models), default=target.prompt_limit)
    has_room = limit >= target.limit and source_limit >= target.prompt_limit
    if has_room or able.handles_context_limit:
        return drafter
    return WithinContext(drafter, limit, source_limit)


@dataclass
class WithinState:
    """The state of the wrapped drafter, and the batch that it sees.

    Attributes:
        context: the engine's batch.
        rows: which of the engine's rows the drafter sees, in the drafter's order.
        own: these rows as a batch of their own.
        inner: the drafter's state; None if it sees no rows.
        draft: the drafter's last draft.
    """

    context: Context
    rows: list[int]
    own: Context
    inner: Any
    draft: Draft | None = None
    _distribution: Distribution | None = field(default=None, init=False, repr=False)

    @property
    def has_all(self) -> bool:
        """Whether the drafter sees all rows of the engine's batch, in their order."""
        return self.rows == list(range(self.context.num_rows))

    def of(self, tensor_B: Tensor) -> Tensor:
        """The drafter's rows of a tensor, (R, …)."""
        return tensor_B[self._index_on(tensor_B.device)]

    def over_all(self, number_R: Tensor) -> Tensor:
        """Numbers of the drafter's rows as numbers of the engine's rows, (B,); 0 for the others."""
        number_B = number_R.new_zeros(self.context.num_rows)
        return number_B.index_copy(0, self._index_on(number_R.device), number_R)

    def _index_on(self, device: torch.device) -> Tensor:
        return to_device(torch.tensor(self.rows, dtype=torch.int64), device)

    def follow(self) -> None:
        """Copies what was committed, and the rows' distributions, into the drafter's batch."""
        context, own = self.context, self.own
        if self.has_all:
            own.follow(context.tokens_BT, context.sequence_lengths)
            own.distribution = context.distribution
        elif self.rows:
            own.follow(self.of(context.tokens_BT), context.sequence_lengths.keep(self.rows))
            if self._distribution is not context.distribution:
                own.distribution = _distribution_of(context, self.rows)
        self._distribution = context.distribution

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows; called before the context keeps its own."""
        self.follow()
        if self.has_all:
            self._leave(rows)
            self.rows = list(range(len(rows)))
            return
        now = {row: index for index, row in enumerate(rows)}
        self._leave([i for i, row in enumerate(self.rows) if row in now])
        self.rows = [now[row] for row in self.rows]

    def leave(self, fits: Sequence[bool]) -> None:
        """Removes the rows that do not fit any more from the drafter's batch."""
        if not all(fits):
            self._leave([i for i, fit in enumerate(fits) if fit])
            self.follow()

    def _leave(self, kept: Sequence[int]) -> None:
        """Keeps these of the drafter's rows, as numbered there."""
        if self.inner is None:
            return
        self.inner.keep(kept)
        if kept:
            self.own.keep(kept)
        else:
            self.inner = None
        self.rows = [self.rows[i] for i in kept]
        self._distribution = None

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row."""
        self.follow()
        if self.inner is not None:
            self.inner.rollback(lengths if self.has_all else lengths.keep(self.rows))


class WithinContext:
    """A drafter restricted to the rows that fit into its models' context.

    Args:
        drafter: the wrapped drafter.
        limit: longest context of its models in tokens.
        source_limit: longest source of its models in tokens, if they are encoder-decoders.
    """

    def __init__(self, drafter: Drafter[Any], limit: int, source_limit: int) -> None:
        self.drafter = drafter
        self.limit = limit
        self.source_limit = source_limit

    @property
    def drawn(self) -> Drawn:
        return self.drafter.drawn

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        able = self.drafter.capabilities
        return replace(able, handles_context_limit=True, reviews=False, starts_late=False)

    def start(self, context: Context) -> WithinState:
        state: WithinState = self.begin(context).finish()
        return state

    def begin(self, context: Context) -> Prefilling:
        """As :meth:`start`, but the caller runs the forward passes."""
        fits = self._fits(context)
        rows = [row for row, fit in enumerate(fits) if fit]
        own = _batch_of(context, rows)
        inner = begin(self.drafter, own) if rows else Prefilling(None)
        return Prefilling(WithinState(context, rows, own, inner.state), inner.prefills)

    def read_prompt(
        self, state: WithinState, context: Context, hidden_BNH: Tensor, first: int
    ) -> None:
        if state.inner is not None:
            hidden_RNH = state.of(hidden_BNH)
            prompt_reader(self.drafter, state.inner, state.own)(hidden_RNH, first)

    def propose(self, state: WithinState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.follow()
        state.leave(self._fits(state.own))
        if state.inner is None:
            return Draft.root_only(context.root_B)
        if state.has_all:
            own_rng, own_budget = rng, budget
        else:
            own_rng = Stream(state.of(rng.key_B), state.of(rng.position_B))
            tokens_B = budget.tokens_B
            own_budget = replace(budget, tokens_B=None if tokens_B is None else state.of(tokens_B))
        own_budget = self._fitting(own_budget, state.own)
        state.draft = self.drafter.propose(state.inner, state.own, own_budget, own_rng)
        for model, sum_R in state.own.health.drain():
            context.health.add(model, state.over_all(sum_R))
        if state.has_all:
            return state.draft
        return _spread(state.draft, state)

    def commit(self, state: WithinState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        if state.inner is None:
            return
        assert state.draft is not None
        if not state.has_all:
            scores = scores.of_rows(state.of)
            accepted = verdict.num_accepted.keep(state.rows)
            verdict = Verdict(
                state.of(verdict.path_BD), accepted.device_B, state.of(verdict.next_token_B)
            ).read(accepted.host)
        self.drafter.commit(state.inner, state.draft, verdict, scores)

    def join(self, state: WithinState, other: WithinState) -> None:
        state.follow()
        other.follow()
        first = state.context.num_rows
        if state.inner is None:
            state.own, state.inner = other.own, other.inner
        elif other.inner is not None:
            self.drafter.join(state.inner, other.inner)
            state.own.join(other.own)
        state.rows = state.rows + [first + row for row in other.rows]
        state._distribution = None

    def _fits(self, context: Context) -> list[bool]:
        """Which rows fit with one token more."""
        fits = [length < self.limit for length in context.lengths]
        if context.sources is None:
            return fits
        sources = zip(fits, context.sources, strict=True)
        return [fit and len(source) <= self.source_limit for fit, source in sources]

    def _fitting(self, budget: Budget, own: Context) -> Budget:
        """The budget, cut to what fits into the models' context."""
        most = budget.max_tokens
        if max(own.lengths) + most <= self.limit:
            return budget
        tokens_R = (self.limit - own.length_B).clamp(max=most)
        if budget.tokens_B is not None:
            tokens_R = torch.minimum(tokens_R, budget.tokens_B)
        most = min(most, self.limit - min(own.lengths))
        return replace(budget, max_tokens=most, tokens_B=tokens_R)


def _batch_of(context: Context, rows: Sequence[int]) -> Context:
    """These rows as a batch of their own."""
    index_R = torch.tensor(rows, dtype=torch.int64, device=context.device)
    sources, predictions = context.sources, context.predictions
    return Context(
        context.tokens_BT[index_R],
        context.sequence_lengths.keep(rows),
        context.prompt_length_B[index_R],
        context.key_B[index_R],
        _distribution_of(context, rows),
        None if sources is None else [sources[row] for row in rows],
        predictions=None if predictions is None else [predictions[row] for row in rows],
    )


def _distribution_of(context: Context, rows: Sequence[int]) -> Distribution:
    """The distribution of these rows."""
    distribution = context.distribution
    if len(rows) == context.num_rows and list(rows) == sorted(rows):
        return distribution
    assert isinstance(distribution, Warp), "only a Warp can be split into rows"
    return distribution.of_rows(rows)


def _spread(draft: Draft, state: WithinState) -> Draft:
    """A draft of the drafter's rows as one of all rows; the others have the root alone. Their draft
    distributions are uniform, so that no rule divides by zero there."""
    root_B1 = state.context.root_B[:, None]
    B, N = root_B1.shape[0], draft.num_nodes
    index_R = torch.tensor(state.rows, device=root_B1.device)

    def over(rest: Tensor, own: Tensor) -> Tensor:
        whole = rest.to(own.dtype).expand(B, *own.shape[1:]).clone()
        whole[index_R] = own
        return whole

    def constant(value: float, own: Tensor | None) -> Tensor | None:
        return None if own is None else over(torch.full_like(own[:1], value), own)

    is_root_1N = torch.arange(N, device=root_B1.device)[None] == 0
    probs_BNV = draft.probs_BNV
    return replace(
        draft,
        tokens_BN=over(root_B1, draft.tokens_BN),
        parents_BN=over(draft.parents_BN[:1], draft.parents_BN),
        mask_BN=over(is_root_1N, draft.mask_BN),
        probs_BNV=constant(0 if probs_BNV is None else 1 / probs_BNV.shape[2], probs_BNV),
        logits_BNV=constant(0, draft.logits_BNV),
        step_probs_BN=constant(1, draft.step_probs_BN),
        drawn_probs_BN=constant(1, draft.drawn_probs_BN),
    )
