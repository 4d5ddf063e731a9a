"""A model's chain drafted by one graph, where it can be: no Python between its tokens.

The same chain as :class:`ModelDrafter` drafts step by step, up to rounding, from the same random
numbers. A row that lacks fewer tokens than another is fed its last ones again: they write what is
there already. Step by step go drafts of another length than the graph's and distributions that are
more than a temperature.

Legend: B rows, N nodes (γ + 1), V vocabulary.
"""

from dataclasses import replace
from weakref import ref

from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Distribution, Draft, Role, Stream
from outrider.drafters.chain.model import ModelDrafter, ModelState
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel
from outrider.sampling.warp import Warp


class FusedModelDrafter(ModelDrafter):
    """Samples a chain from a draft model.

    Args:
        model, num_tokens, stop: as for :class:`ModelDrafter`.
        num_fused: length of the drafts that one graph makes; 0 if none does.

    Raises:
        InvalidParameterError: a confidence outside [0, 1].
    """

    _last: tuple[ref[Distribution], bool] | None = None

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        stop: Stop | float | None = None,
        *,
        num_fused: int = 0,
    ) -> None:
        super().__init__(model, num_tokens, stop)
        self.num_fused = num_fused

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        fused_tokens = 0 if self.stop is not None else self.num_fused
        return replace(super().capabilities, fused_tokens=fused_tokens)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        state.settle()
        if self._fits(state, context, budget):
            draft = self._whole(state, context, budget, rng)
            if draft is not None:
                return draft
        return super().propose(state, context, budget, rng)

    def _fits(self, state: ModelState, context: Context, budget: Budget) -> bool:
        if self.num_fused != budget.max_tokens:
            return False
        last = self._last
        if last is None or last[0]() is not context.distribution:  # as a rule it stays the same
            self._last = last = ref(context.distribution), self._draws(context.distribution)
        return last[1] and max(self._lacking(state, context)) <= min(context.lengths)

    def _draws(self, distribution: Distribution) -> bool:
        """Whether the graph draws by such a distribution."""
        graph = self.model.compiled
        return (
            graph is not None
            and not graph.failed
            and self.num_fused > 0
            and self.stop is None
            and self.drawn == "iid"
            and self.model.num_tokens == self.num_tokens
            and isinstance(distribution, Warp)
            and (distribution.keeps_logits if distribution.greedy else distribution.only_scales)
        )

    def _whole(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft | None:
        cache, distribution, γ = state.cache, context.distribution, self.num_fused
        assert isinstance(distribution, Warp)
        numbers: tuple[Tensor | None, Tensor | None] = None, None
        if not distribution.greedy:
            numbers = distribution.temperature_B, rng.uniform(Role.DRAFT, γ)
        lacking, before = self._lacking(state, context), (cache.length_B, cache.lengths)
        K = max(lacking)
        if min(lacking) < K:
            cache.length_B, cache.lengths = context.length_B - K, [n - K for n in context.lengths]
        done = self.model.draft(cache, self._uncached(state, context, K), γ, *numbers)
        if done is None:
            cache.length_B, cache.lengths = before
            return None
        probs_BNV, tokens_BN = done
        fed = γ - 1
        state.roots, state.root_B, state.fed = list(context.lengths), context.length_B, fed
        state.open = True
        cache.length_B = context.length_B + fed
        cache.lengths = [length + fed for length in context.lengths]
        mask_BN = self._within(budget, γ + 1, context)
        if distribution.greedy:
            logits_BNV = probs_BNV if self.keep_logits else None
            return Draft.chain(tokens_BN, mask_BN, None, "chosen", logits_BNV)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV, self.drawn)
