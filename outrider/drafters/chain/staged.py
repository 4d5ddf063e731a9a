"""A draft model that is itself drafted for: speculative decoding below speculative decoding.

Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding", 2023, section 3.2.
https://arxiv.org/abs/2308.04623

    x_1 … x_γ  by rounds whose target is the draft model q and whose draft is a cheaper one

The inner rule is lossless, so x_i ~ q( . | x_<i) exactly, whatever the cheaper draft was; the
distributions handed on are the draft model's own, which its passes have computed anyway. Exactness
composes: to the outer rule this is the draft model's chain, in fewer passes. The cheaper draft may
be any drafter, another stage among them. (The paper drafts trees at the outer level; here it is a
chain.)

A round emits a correction or a bonus beyond what was drafted for it, and rows need different
numbers of rounds. Rows that are done go on with the others, one token a round, and what they write
beyond γ is forgotten: how many tokens count is known beforehand, so that biases nothing.

Every inner round has random numbers of its own, children of the outer round's (decision 0006): the
places of a rejected draft come again, its numbers must not.

Reads the device once per inner round, and once before the first.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (γ + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    Drawn,
    Scores,
    Stream,
    Verdict,
    Verifier,
    check_compatible,
    run_round,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.chain.draft_length import cut
from outrider.drafters.chain.stage import StageContext, StageDistributions, StageTarget
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel, KVCache

INNER_TOKENS = 4


@dataclass
class StagedState:
    """What a stage remembers of a batch.

    Attributes:
        text: the stage's own; longer than the committed one by what it drafted.
        cache: the draft model's; between rounds it lacks the last token of ``text``.
        inner: the cheaper drafter's state.
        roots: how many tokens of ``text`` are committed ones for sure.
    """

    text: StageContext
    cache: KVCache
    inner: Any
    roots: list[int]

    def settle(self) -> None:
        """What the host knows of the cache follows from what it knows of the text."""
        self.cache.lengths = [length - 1 for length in self.text.lengths]

    def keep(self, rows: Sequence[int]) -> None:
        self.settle()
        self.cache.keep(rows)
        self.inner.keep(rows)
        self.text.keep(rows)
        self.roots = [self.roots[row] for row in rows]

    def rewind(self, length_B: Tensor, lengths: Sequence[int]) -> None:
        """The next draft will compare what lies beyond."""
        self.roots = list(map(min, self.roots, lengths))


class StagedDrafter:
    """Samples a chain from a draft model, by rounds with a cheaper drafter.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft's are cut or padded to it.
        inner: the cheaper drafter.
        rule: the rule of inner rounds, such as ``Rejection``; lossless.
        greedy_rule: the same for batches whose rows are all at temperature 0, such as ``Greedy``.
        inner_tokens: most tokens that the cheaper drafter drafts per round.
        stop: where a row stops before its budget; saves work of the target only.

    Raises:
        IncompatibleError: a rule that cannot verify the cheaper drafts, or is not lossless; a
            cheaper drafter with a vocabulary of its own, which cannot forget text.
        InvalidParameterError: a number of tokens below 1.
    """

    drawn: Drawn = "iid"

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        inner: Drafter[Any],
        rule: Verifier,
        greedy_rule: Verifier,
        inner_tokens: int = INNER_TOKENS,
        *,
        stop: Stop | None = None,
    ) -> None:
        if inner_tokens < 1:
            raise InvalidParameterError(f"inner_tokens={inner_tokens!r}: must be 1 or more")
        if inner.capabilities.own_vocabulary:
            raise IncompatibleError(
                f"{type(inner).__name__} follows the text in tokens of its own and cannot take "
                f"back what a stage drafts and the target rejects: give the stage a draft of the "
                f"same vocabulary, such as PromptLookup, or take it without a stage"
            )
        check_compatible(inner, rule)
        check_compatible(inner, greedy_rule)
        if not (rule.lossless and rule.needs == "distribution" and greedy_rule.lossless):
            raise IncompatibleError(
                f"{type(rule).__name__} at temperature 1 and {type(greedy_rule).__name__} at 0 do "
                f"not keep the draft model's distribution, which a stage must: use Rejection and "
                "Greedy"
            )
        self.model = model
        self.inner = inner
        self.rule = rule
        self.greedy_rule = greedy_rule
        self.inner_tokens = inner_tokens
        self.stop = stop
        self._target = StageTarget(model, num_tokens)

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        models = (self.model, *self.inner.capabilities.models)
        stops = self.stop is not None
        return Capabilities(models, max_nodes=self._most_slots, stops_early=stops, rewindable=True)

    def start(self, context: Context) -> StagedState:
        text = StageContext.of(context)
        return StagedState(text, self.model.start(text), self.inner.start(text), text.lengths)

    def propose(self, state: StagedState, context: Context, budget: Budget, rng: Stream) -> Draft:
        γ, greedy = budget.max_tokens, context.distribution.greedy
        if γ < 1:
            return Draft.root_only(context.root_B)
        self._follow(state, context)
        distributions = self._write(state, context, budget, rng)
        T = state.text.tokens_BT.shape[1]
        place_BN = context.length_B[:, None] + torch.arange(-1, γ, device=context.device)
        tokens_BN = state.text.tokens_BT.gather(1, place_BN.clamp(max=T - 1))
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if budget.tokens_B is not None:
            mask_BN = place_BN < (context.length_B + budget.tokens_B)[:, None]
        if greedy and self.stop is None:
            return Draft.chain(tokens_BN, mask_BN, None, "chosen")
        draft = Draft.chain(tokens_BN, mask_BN, distributions.q_BNV, "iid")
        if self.stop is not None:
            draft = cut(draft, self.stop)
        return replace(draft, probs_BNV=None, drawn="chosen") if greedy else draft

    def commit(self, state: StagedState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing yet: the next draft compares its text with what was committed."""

    def join(self, state: StagedState, other: StagedState) -> None:
        state.settle()
        other.settle()
        self.model.join(state.cache, other.cache)
        self.inner.join(state.inner, other.inner)
        state.text.join(other.text)
        state.roots = state.roots + other.roots

    def _most_slots(self, num_tokens: int) -> int:
        """Slots behind the committed text: rows that are done go on with the others, for as many
        rounds as these need, and behind them stands the cheaper drafter's draft."""
        return 2 * num_tokens + self.inner.capabilities.max_nodes(self.inner_tokens) + 1

    def _follow(self, state: StagedState, context: Context) -> None:
        """Takes back what was not accepted, and takes over what was committed."""
        text, cache = state.text, state.cache
        length_B = text.in_common_B(context, min(state.roots)).clamp(max=context.length_B - 1)
        lengths = length_B.tolist()
        rewinds = self.inner.capabilities.rewindable
        if rewinds:
            state.inner.rewind(length_B, lengths)
        unchanged = text.lengths == context.lengths == [n + 1 for n in lengths]
        cache.length_B = torch.minimum(text.length_B - 1, length_B)
        cache.lengths = [min(n - 1, m) for n, m in zip(text.lengths, lengths, strict=True)]
        text.follow(context)
        state.roots = text.lengths
        if not (unchanged or rewinds):
            state.inner = self.inner.start(text)

    def _write(
        self, state: StagedState, context: Context, budget: Budget, rng: Stream
    ) -> StageDistributions:
        """Rounds until every row has its tokens; the distributions that they came from."""
        γ, text = budget.max_tokens, state.text
        rule = self.greedy_rule if context.distribution.greedy else self.rule
        distributions, number = StageDistributions(context, γ), 0
        left = [γ] * context.num_rows if budget.tokens_B is None else budget.tokens_B.tolist()
        while max(left) > 0:
            text.stream = rng.child(number)
            before_B, number = text.length_B, number + 1
            inner = self._budget(left, context.device)
            round_ = run_round(
                text, self._target, state.cache, self.inner, state.inner, rule, inner
            )
            if not context.distribution.greedy:
                distributions.add(round_.p_BNV, round_.verdict, before_B)
            elif self.stop is not None:
                distributions.add(round_.p_BNV.softmax(-1), round_.verdict, before_B)
            emitted = (round_.verdict.num_accepted_B + 1).tolist()
            text.advance(emitted)
            state.settle()
            left = [n - m for n, m in zip(left, emitted, strict=True)]
        return distributions

    def _budget(self, left: Sequence[int], device: torch.device) -> Budget:
        """An inner round emits one token more than it drafts."""
        tokens = [min(self.inner_tokens, max(n, 1) - 1) for n in left]
        if min(tokens) == max(tokens):
            return Budget(tokens[0])
        return Budget(max(tokens), torch.tensor(tokens, device=device))
