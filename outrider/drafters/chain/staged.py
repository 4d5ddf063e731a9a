"""A draft model that is itself drafted for: speculative decoding below speculative decoding.

Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding", 2023, section 3.2.
https://arxiv.org/abs/2308.04623

    x_1 … x_γ  by rounds whose target is the draft model q and whose draft is a cheaper one

The inner rule is lossless, so x_i ~ q( . | x_<i) exactly, whatever the cheaper draft was. The
distributions that the stage hands on are the draft model's own, which its forward passes have
computed anyway. Exactness composes: to the outer rule this is the draft model's chain, in fewer
passes. The cheaper draft may be any drafter, another stage among them. (The paper drafts trees at
the outer level; here it is a chain.)

A round emits a correction or a bonus token beyond what was drafted for it, and rows need different
numbers of rounds. Rows that are done go on with the others, one token a round, and what they write
beyond γ is forgotten. How many tokens count is known beforehand, so this biases nothing.

Every inner round has random numbers of its own, children of the outer round's (decision 0006): the
positions of a rejected draft come again, its random numbers must not.

Reads the device once per inner round, and once before the first.

Proposes: i.i.d. chains.

Legend: B rows, N nodes (γ + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    Drawn,
    Lengths,
    Scores,
    Stream,
    Verifier,
    check_compatible,
    commit_round,
    run_round,
)
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.chain.draft_length import cut
from outrider.drafters.chain.stage import StageContext, StageDistributions, StageTarget
from outrider.drafters.chain.stop import Stop
from outrider.runtime import HFModel, KVCache
from outrider.runtime.prefill import Prefilling, begin

INNER_TOKENS = 4


@dataclass
class StagedState:
    """What a stage remembers of a batch.

    Attributes:
        sequences: the committed tokens, and after them what the stage has drafted.
        cache: the draft model's; between rounds it lacks the last token of ``sequences``.
        inner: the cheaper drafter's state.
        committed: how many leading tokens of ``sequences`` are sure to be those of the context.
    """

    sequences: StageContext
    cache: KVCache
    inner: Any
    committed: list[int]

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
        self.inner.keep(rows)
        self.sequences.keep(rows)
        self.committed = [self.committed[row] for row in rows]

    def rollback(self, lengths: Lengths) -> None:
        """Lets the next draft compare the tokens beyond these lengths with the context's."""
        self.committed = list(map(min, self.committed, lengths.host))


class StagedDrafter:
    """Samples a chain from a draft model, by rounds with a cheaper drafter.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        inner: the cheaper drafter.
        rule: the rule of inner rounds, such as ``Rejection``; lossless.
        greedy_rule: the rule for batches whose rows are all at temperature 0, such as ``Greedy``.
        inner_tokens: most tokens that the cheaper drafter drafts per round.
        stop: where a row stops before its budget. This saves work of the target only.

    Raises:
        IncompatibleError: a rule that cannot verify the cheaper drafts, or is not lossless; a
            cheaper drafter with a vocabulary of its own, which cannot forget tokens.
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
                f"{type(inner).__name__} drafts in a vocabulary of its own and cannot take "
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
        state: StagedState = self.begin(context).finish()
        return state

    def begin(self, context: Context) -> Prefilling:
        """As :meth:`start`, but the caller runs the forward passes."""
        sequences = StageContext.of(context)
        prefill, inner = self.model.begin(sequences), begin(self.inner, sequences)
        state = StagedState(sequences, prefill.cache, inner.state, sequences.lengths)
        return Prefilling(state, [prefill, *inner.prefills])

    def propose(self, state: StagedState, context: Context, budget: Budget, rng: Stream) -> Draft:
        γ, greedy = budget.max_tokens, context.distribution.greedy
        left = [γ] * context.num_rows if budget.tokens_B is None else budget.tokens_B.tolist()
        if min(γ, max(left)) < 1:
            return Draft.root_only(context.root_B)
        self._follow(state, context)
        distributions = self._write(state, context, γ, left, rng)
        drafted_BT = state.sequences.tokens_BT
        position_BN = context.length_B[:, None] + torch.arange(-1, γ, device=context.device)
        tokens_BN = drafted_BT.gather(1, position_BN.clamp(max=drafted_BT.shape[1] - 1))
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if budget.tokens_B is not None:
            mask_BN = position_BN < (context.length_B + budget.tokens_B)[:, None]
        if greedy and self.stop is None:
            return Draft.chain(tokens_BN, mask_BN, None, "chosen")
        draft = Draft.chain(tokens_BN, mask_BN, distributions.q_BNV, "iid")
        if self.stop is not None:
            draft = cut(draft, self.stop)
        return replace(draft, probs_BNV=None, drawn="chosen") if greedy else draft

    def commit(self, state: StagedState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Nothing: the next draft compares the stage's tokens with the context's."""

    def join(self, state: StagedState, other: StagedState) -> None:
        self.model.join(state.cache, other.cache)
        self.inner.join(state.inner, other.inner)
        state.sequences.join(other.sequences)
        state.committed = state.committed + other.committed

    def _most_slots(self, num_tokens: int) -> int:
        """Slots after the committed tokens: rows that are done go on with the others, for as many
        rounds as these need, and the cheaper drafter's draft follows them."""
        return 2 * num_tokens + self.inner.capabilities.max_nodes(self.inner_tokens) + 1

    def _follow(self, state: StagedState, context: Context) -> None:
        """Takes back what was not accepted, and takes over what was committed."""
        sequences = state.sequences
        length_B = sequences.in_common_B(context, min(state.committed))
        common = Lengths.read(length_B.clamp(max=context.length_B - 1))
        rolls_back = self.inner.capabilities.rewindable
        if rolls_back:
            state.inner.rollback(common)
        unchanged = sequences.lengths == context.lengths == [n + 1 for n in common.host]
        state.cache.rollback(common)
        sequences.return_to(context)
        state.committed = sequences.lengths
        if not (unchanged or rolls_back):
            state.inner = self.inner.start(sequences)

    def _write(
        self, state: StagedState, context: Context, γ: int, left: Sequence[int], rng: Stream
    ) -> StageDistributions:
        """Runs inner rounds until every row has as many tokens as are ``left``, at most γ; the
        distributions that the tokens were drawn from."""
        sequences = state.sequences
        rule = self.greedy_rule if context.distribution.greedy else self.rule
        distributions, number = StageDistributions(context, γ), 0
        while max(left) > 0:
            sequences.stream = rng.child(number)
            before_B, number = sequences.length_B, number + 1
            parts = sequences, self._target, state.cache, self.inner, state.inner
            round_ = run_round(*parts, rule, self._budget(left, context.device))
            if not context.distribution.greedy:
                distributions.add(round_.p_BNV, round_.verdict, before_B)
            elif self.stop is not None:
                distributions.add(round_.p_BNV.softmax(-1), round_.verdict, before_B)
            accepted = round_.verdict.num_accepted_B.tolist()
            commit_round(*parts, round_, accepted)
            left = [n - m - 1 for n, m in zip(left, accepted, strict=True)]
        return distributions

    def _budget(self, left: Sequence[int], device: torch.device) -> Budget:
        """How many tokens each row drafts in an inner round, which emits one token more."""
        tokens = [min(self.inner_tokens, max(n, 1) - 1) for n in left]
        if min(tokens) == max(tokens):
            return Budget(tokens[0])
        return Budget(max(tokens), torch.tensor(tokens, device=device))
