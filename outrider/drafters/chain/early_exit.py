"""The target's own first layers draft, in the target's cache.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
https://arxiv.org/abs/2404.16710

    x_i ~ q_i = distribution of head(norm(layers 0 … k-1)),   i = 1 … γ

``runtime/hf/early_exit.py`` says how layers are left out and what is shared. All nodes of a draft
pass the first layers here, the last node without a head, so that the target's forward pass only has
to run the other layers. γ tokens cost γ + 1 passes of k layers and one of L - k: as many layers as
a draft model of k layers and its target would run, but no layer sees a token twice, and there is no
second cache.

How much is accepted depends on the model. The exit of a model trained for it (LayerSkip) predicts
well; the head of an ordinary model has never seen the output of a middle layer.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (γ + 1).
"""

from collections.abc import Sequence
from dataclasses import replace

from outrider.core import Acceptance, Budget, Capabilities, Context, Draft, Lengths, Scores, Stream
from outrider.drafters.chain.model import ModelDrafter, ModelState
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel
from outrider.runtime.hf.early_exit import EarlyExit, SharedCache
from outrider.runtime.prefill import Prefilling


class EarlyExitState(ModelState):
    """The target's cache. The target keeps and joins its rows, and takes back what was drafted when
    it scores: drafted tokens have not passed all layers."""

    def __init__(self, cache: SharedCache) -> None:
        super().__init__(cache)
        self.shared = cache

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing: the target keeps the rows of its cache."""

    def rollback(self, lengths: Lengths) -> None:
        """Nothing: the target's cache holds the committed tokens alone."""


class EarlyExitDrafter(ModelDrafter):
    """Samples a chain from the target's first layers.

    Shares the cache of a batch that the target has started. Under another target the first layers
    are an ordinary draft model, with a cache of its own.

    Args:
        target: the model, which is also the target of the rounds.
        stop: where a row stops before its budget.
    """

    def __init__(self, target: EarlyExit, stop: Stop | None = None) -> None:
        super().__init__(target.first, target.num_tokens, stop)
        self.target = target

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        able = super().capabilities
        return replace(able, target=self.target, reviews=False, starts_late=False)

    def begin(self, context: Context) -> Prefilling:
        cache = self.target.cache_of(context)
        return super().begin(context) if cache is None else Prefilling(EarlyExitState(cache))

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        if isinstance(state, EarlyExitState):  # the last draft may not have been scored
            state.shared.rollback(context.sequence_lengths - 1)
        draft = super().propose(state, context, budget, rng)
        if isinstance(state, EarlyExitState) and draft.num_nodes > 1:
            self.target.first.read(state.shared, draft.tokens_BN[:, -1:])
            state.shared.tokens_BN = draft.tokens_BN
        return draft

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        if not isinstance(state, EarlyExitState):  # else the target has committed its cache
            super().commit(state, draft, verdict, scores)

    def join(self, state: ModelState, other: ModelState) -> None:
        if not isinstance(state, EarlyExitState):  # else the target joins the caches
            super().join(state, other)
