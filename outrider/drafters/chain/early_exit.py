"""The target's own first layers draft, in the target's cache.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
https://arxiv.org/abs/2404.16710

    x_i ~ q_i = distribution of head(norm(layers 0 … k-1)),   i = 1 … γ

``runtime/hf/early_exit.py`` says how layers are left out and what draft and target share. The first
layers run over all nodes of a draft here, over the last one without the head, so the target's
forward pass is left with the other layers. γ tokens cost γ + 1 forward passes of k layers and one
of L - k layers: as many layers as a draft model of k layers and its target would run, but no layer
runs over a token twice, and there is no second cache.

How much is accepted depends on the model. One that was trained for early exit (LayerSkip) has a
head that can read layer k; the head of an ordinary model has never read the middle layers.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (γ + 1).
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.core import Budget, Context, Draft, Scores, Stream, Verdict
from outrider.drafters.chain.model import ModelDrafter, ModelState
from outrider.drafters.chain.stop import Stop
from outrider.runtime.hf.early_exit import EarlyExit, SharedCache


class EarlyExitState(ModelState):
    """The target's cache. The target keeps, joins and commits it."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__(cache)
        self.shared = cache

    def settle(self) -> None:
        """Forgets the draft: the target has run all layers over the committed tokens."""
        self.shared.rewind()
        self.shared.forget()

    def keep(self, rows: Sequence[int]) -> None:
        """The target keeps the rows of its cache."""

    def rewind(self, length_B: Tensor, lengths: Sequence[int]) -> None:
        """Nothing to do: the target rewinds its own cache."""


class EarlyExitDrafter(ModelDrafter):
    """Samples a chain from the target's first layers.

    Shares the cache of a batch that the target has started. With another target it is an ordinary
    draft model, with a cache of its own.

    Args:
        target: the model that drafts, and is usually the target of the rounds.
        stop: where a row stops before its budget.
    """

    def __init__(self, target: EarlyExit, stop: Stop | None = None) -> None:
        super().__init__(target.first, target.num_tokens, stop)
        self.target = target

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
