"""A model's chain drafted by one compiled program where possible: no Python between its tokens.

The chain is the one that :class:`ModelDrafter` drafts step by step from the same random numbers, up
to rounding. A row that lacks fewer tokens than another is fed its last ones again, which rewrites
what its cache holds already. Drafts of another length than the program's, and distributions that
are more than a temperature, are drafted step by step.

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
        num_fused: length of the drafts that one compiled program makes; 0 if none does.

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
        if self._fits(state, context, budget):
            draft = self._fused(state, context, budget, rng)
            if draft is not None:
                return draft
        return super().propose(state, context, budget, rng)

    def _fits(self, state: ModelState, context: Context, budget: Budget) -> bool:
        """Whether the compiled program can make this draft."""
        if self.num_fused != budget.max_tokens:
            return False
        last = self._last
        if last is None or last[0]() is not context.distribution:  # most rounds keep theirs
            self._last = last = ref(context.distribution), self._draws(context.distribution)
        if not last[1]:
            return False
        return self._can_catch_up(state, context)

    def _can_catch_up(self, state: ModelState, context: Context) -> bool:
        """Whether all rows have as many tokens as the row that lacks most."""
        self._drop_uncommitted(state, context)
        self._read_backlog(state, context)
        return max(self._lacking(state, context)) <= min(context.lengths)

    def _draws(self, distribution: Distribution) -> bool:
        """Whether the compiled program can draw from such a distribution."""
        graph = self.model.compiled
        return (
            graph is not None
            and not graph.failed
            and self.num_fused > 0
            and self.stop is None
            and self.drawn == "iid"
            and self.model.num_tokens == self.num_tokens
            and is_temperature(distribution)
        )

    def _fused(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft | None:
        """The draft by one program; None if there is none after all."""
        distribution, γ = context.distribution, self.num_fused
        assert isinstance(distribution, Warp)
        numbers: tuple[Tensor | None, Tensor | None] = None, None
        if not distribution.greedy:
            numbers = distribution.temperature_B, rng.uniform(Role.DRAFT, γ)
        done = self._run_program(state, context, *numbers)
        if done is None:
            return None
        probs_BNV, tokens_BN = done
        mask_BN = self._within(budget, γ + 1, context)
        if distribution.greedy:
            logits_BNV = probs_BNV if self.keep_logits else None
            return Draft.chain(tokens_BN, mask_BN, None, "chosen", logits_BNV)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV, self.drawn)

    def _run_program(
        self,
        state: ModelState,
        context: Context,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """What ``runner.fused_draft`` returns; the cache then holds what the model has read."""
        cache, γ = state.cache, self.num_fused
        lacking = self._lacking(state, context)
        K = max(lacking)
        if min(lacking) < K:
            cache.rollback(context.sequence_lengths - K)
        tokens_BK = self._uncached(state, context, K)
        done = self.model.draft(cache, tokens_BK, γ, temperature_B, u_BD)
        if done is not None:
            cache.append(K + γ - 1)  # nobody has read the last token
        return done


def is_temperature(distribution: Distribution) -> bool:
    """Whether programs can draw from a distribution: a temperature, or the argmax of the logits."""
    return isinstance(distribution, Warp) and (
        distribution.keeps_logits if distribution.greedy else distribution.only_scales
    )
