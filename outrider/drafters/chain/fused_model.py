"""A model's chain drafted by one compiled program where possible: no Python between its tokens.

The chain is the one that :class:`ModelDrafter` drafts step by step from the same random numbers, up
to rounding. A row that lacks fewer tokens than another is fed its last ones again, which rewrites
what its cache holds already.

Drafts which stop early take one program per token: the forward pass, the distribution and the draw.
Where lengths vary, there may be programs of several lengths besides, and a draft of another length
is put together from the longest of them. Under processors or forced tokens, and where the only
program has another length, drafts are drafted step by step.

Legend: B rows, N nodes (γ + 1), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from weakref import ref

from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Distribution, Draft, Stream
from outrider.core.chain import with_leaf
from outrider.drafters.chain.model import Going, ModelDrafter, ModelState, token_probs
from outrider.drafters.chain.pick import INDEPENDENT, Picker
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel
from outrider.sampling.warp import DraftParameters, Warp


class FusedModelDrafter(ModelDrafter):
    """Samples a chain from a draft model.

    Args:
        model, num_tokens, stop, picker, keep_logits: as for :class:`ModelDrafter`.
        num_fused: length of the drafts that one compiled program makes: γ, or 1 for one program per
            token, which a drafter with a stop needs; 0 if none does.
        longer: lengths of further programs, ascending, where ``num_fused`` is 1 and nothing stops
            the drafts.

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
        longer: Sequence[int] = (),
        picker: Picker = INDEPENDENT,
        keep_logits: bool = False,
    ) -> None:
        super().__init__(model, num_tokens, stop, picker=picker, keep_logits=keep_logits)
        self.num_fused = num_fused
        self._lengths = tuple(dict.fromkeys((num_fused, *longer))) if num_fused else ()

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        fused = self.num_fused == 1 or (self.num_fused > 0 and self.stop is None)
        return replace(super().capabilities, fused_lengths=self._lengths if fused else ())

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        if budget.max_tokens and self._fits(state, context, budget):
            draft = self._fused(state, context, budget, rng)
            if draft is not None:
                return draft
        return super().propose(state, context, budget, rng)

    def _fits(self, state: ModelState, context: Context, budget: Budget) -> bool:
        """Whether one compiled program can make this draft."""
        if not self._has_length(budget.max_tokens) or self.stop is not None:
            return False
        return self._can_draw(context.distribution) and self._can_align(state, context)

    def _has_length(self, γ: int) -> bool:
        """Whether a compiled program can make drafts of γ tokens."""
        return γ in self._lengths

    def _program_for(self, γ: int) -> int:
        """The length of the program's drafts that those of γ tokens are the beginning of."""
        return γ

    def _can_draw(self, distribution: Distribution) -> bool:
        """:meth:`_draws`, remembered, since most rounds keep their distribution."""
        last = self._last
        if last is None or last[0]() is not distribution:
            self._last = last = ref(distribution), self._draws(distribution)
        return last[1]

    def _draws(self, distribution: Distribution) -> bool:
        """Whether the compiled program can draw from such a distribution."""
        return (
            self._has_programs
            and self.num_fused > 0
            and self._picker.numbers is not None
            and is_fusible(distribution, self.keep_logits or self.stop is not None)
        )

    def _fused(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft | None:
        """The draft by one program; None if there is none after all."""
        distribution, γ = context.distribution, self._program_for(budget.max_tokens)
        numbers = draft_numbers(context, rng, γ, self._picker)
        done = self._run_program(state, context, γ, *numbers)
        if done is None:
            return None
        probs_BNV, tokens_BN = done
        if budget.max_tokens < γ:
            γ = budget.max_tokens
            probs_BNV, tokens_BN = with_leaf(probs_BNV[:, :γ].unbind(1)), tokens_BN[:, : γ + 1]
        mask_BN = self._within(budget, γ + 1, context)
        if distribution.greedy:
            logits_BNV = probs_BNV if self.keep_logits else None
            return Draft.chain(tokens_BN, mask_BN, None, "chosen", logits_BNV)
        if self._shares_noise:
            q_BN = token_probs(probs_BNV[:, :-1].unbind(1), tokens_BN.unbind(1))
            return Draft.chain(tokens_BN, mask_BN, None, self.drawn, drawn_probs_BN=q_BN)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV, self.drawn)

    def _chain(
        self, state: ModelState, context: Context, γ: int, rng: Stream, going: Going | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        by_program = self.num_fused == 1 and self._can_draw(context.distribution)
        if by_program and self._can_align(state, context):
            found = self._by_programs(state, context, γ, rng, going)
            if found is not None:
                return found
        return super()._chain(state, context, γ, rng, going)

    def _by_programs(
        self, state: ModelState, context: Context, γ: int, rng: Stream, going: Going | None
    ) -> tuple[list[Tensor], list[Tensor]] | None:
        """As :meth:`_chain`, by the longest programs that fit, one after the other, or by one per
        token where the draft may stop; None if there are none after all."""
        parameters, u_BD = draft_numbers(context, rng, γ, self._picker)
        tokens: list[Tensor] = [context.root_B]
        rows: list[Tensor] = []
        lengths = [1] if going is not None else sorted(self._lengths, reverse=True)
        while (i := len(rows)) < γ:
            done = None
            for length in lengths:
                if done is None and length <= γ - i:
                    numbers = parameters, None if u_BD is None else u_BD[:, i : i + length]
                    done = self._continued(state, context, tokens, length, *numbers)
            if done is None:
                return None
            rows_BNV, chain_BN = done
            chain = chain_BN[:, 1:].unbind(1)
            tokens += chain
            rows += rows_BNV[:, :-1].unbind(1)
            if going is not None and not going.on(rows[-1], tokens[-1]):
                break
            if parameters is not None and len(rows) < γ:
                for x_B in chain:
                    parameters = parameters.after(x_B)
        return tokens, rows

    def _continued(
        self,
        state: ModelState,
        context: Context,
        tokens: Sequence[Tensor],
        length: int,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """The next tokens of a draft by one program; as :meth:`_run_program`.

        Args:
            tokens: of the draft so far, root first.
            length: how many to draft; the others as those of :meth:`_run_program`.
        """
        if len(tokens) == 1:
            return self._run_program(state, context, length, parameters, u_BD)
        done = self.model.draft(state.cache, tokens[-1][:, None], length, parameters, u_BD)
        if done is not None:
            state.cache.append(length)
        return done

    def _run_program(
        self,
        state: ModelState,
        context: Context,
        γ: int,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """What ``runner.fused_draft`` of γ tokens returns; the cache then holds what the model has
        read."""
        cache = state.cache
        tokens_BK = self._aligned(state, context)
        done = self.model.draft(cache, tokens_BK, γ, parameters, u_BD)
        if done is not None:
            cache.append(tokens_BK.shape[1] + γ - 1)  # nobody has read the last token
        return done


def draft_numbers(
    context: Context, rng: Stream, γ: int, picker: Picker = INDEPENDENT
) -> tuple[DraftParameters | None, Tensor | None]:
    """What programs draw γ tokens with: the rows' parameters, and the picker's numbers. None for
    greedy rows of unchanged logits, for which programs take the argmax."""
    distribution = context.distribution
    assert isinstance(distribution, Warp)
    if distribution.greedy and distribution.keeps_logits:
        return None, None
    assert picker.numbers is not None
    return distribution.draft_parameters(context), picker.numbers(rng, γ)


def is_fusible(distribution: Distribution, with_logits: bool = False) -> bool:
    """Whether programs can draw from a distribution. Greedy rows whose logits are changed are drawn
    from point masses, so that there are no logits, where a rule or a stop reads those."""
    if not isinstance(distribution, Warp):
        return False
    needs_logits = with_logits and distribution.greedy
    return distribution.keeps_logits if needs_logits else distribution.fuses
