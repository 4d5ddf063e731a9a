"""The target's own first layers draft, in the target's cache.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
https://arxiv.org/abs/2404.16710

    x_i ~ q_i = distribution of head(norm(layers 0 … k-1)),   i = 1 … γ

How layers are left out, and what is shared, is in ``runtime/hf/early_exit.py``. All nodes of a
draft pass the first layers here, the last one without a head, so the target's pass is left with the
others. γ tokens cost γ + 1 passes of k layers and one of L - k: as many layers as a draft model of
k layers and its target would pass, but no layer sees a token twice, and there is no second cache.

How much is accepted hangs on the model: one that was trained for it (LayerSkip) has an exit that
speaks; an ordinary one has a head that never saw the middle layers.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (γ + 1).
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Scores, Stream, Verdict
from outrider.drafters.chain.model import ModelDrafter, ModelState
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit, SharedCache


class EarlyExitState(ModelState):
    """The target's cache, which the target keeps, joins and commits."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__(cache)
        self.shared = cache

    def settle(self) -> None:
        """Takes back what was drafted: the committed tokens passed all layers."""
        self.shared.rewind()
        self.shared.forget()

    def keep(self, rows: Sequence[int]) -> None:
        """The target keeps the rows of its cache."""

    def rewind(self, length_B: Tensor, lengths: Sequence[int]) -> None:
        """The target's cache follows its text."""


class EarlyExitDrafter(ModelDrafter):
    """Samples a chain from the target's first layers.

    Shares the cache of a batch that the target has begun. Where another target is running it is an
    ordinary draft model, with a cache of its own.

    Args:
        target: the target of the rounds, too.
        stop: where a row stops before its budget.
    """

    def __init__(self, target: EarlyExit, stop: Stop | None = None) -> None:
        super().__init__(target.first, target.num_tokens, stop)
        self.target = target

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return replace(super().capabilities, target=self.target)

    def start(self, context: Context) -> ModelState:
        cache = self.target.cache_of(context)
        return super().start(context) if cache is None else EarlyExitState(cache)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        if isinstance(state, EarlyExitState) and draft.num_nodes > 1:
            self.target.first.read(state.shared, draft.tokens_BN[:, -1:])
            state.shared.tokens_BN = draft.tokens_BN
        return draft

    def commit(self, state: ModelState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        if not isinstance(state, EarlyExitState):  # else the target has committed its cache
            super().commit(state, draft, verdict, scores)

    def join(self, state: ModelState, other: ModelState) -> None:
        if not isinstance(state, EarlyExitState):  # else the target joins its caches
            super().join(state, other)
