"""One round of speculative decoding. Every method decodes by repeating this round.

Legend: B rows, N nodes, D depth, K emitted tokens (D+1), M positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from outrider.core.context import Context, Prefix
from outrider.core.counts import DraftCounts
from outrider.core.draft import Acceptance, Draft, Scores, Verdict
from outrider.core.errors import IncompatibleError
from outrider.core.protocols import (
    Budget,
    Drafter,
    Model,
    ReadHidden,
    ReadsHiddenStates,
    SequenceState,
    SharesHiddenStates,
    Verifier,
)
from outrider.core.rng import Stream

BindLogits = Callable[[Tensor], Verifier]
"""``UsesRawLogits.with_raw_logits``, looked up by name: an ``isinstance`` check of a protocol is
slower."""


class Deferred:
    """A tensor that is computed once, when it is read. Most rounds are asked for few of their
    results, so what a verification program need not compute is left to the reader.

    Args:
        compute: depends on nothing that changes between its creation and the reading.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    @classmethod
    def known(cls, tensor: Tensor) -> "Deferred":
        """A tensor that is there already."""
        return cls(lambda: tensor)

    @cached_property
    def value(self) -> Tensor:
        """The tensor."""
        return self._compute()


class Round(NamedTuple):
    """Everything a round decided, still on the device and not yet committed.

    Attributes:
        proposed: the drafter's draft, over which the target has run.
        draft: the draft that was verified: ``proposed`` without the nodes after an end token.
        scores: the target's raw logits at the nodes.
        p: the input of the verifier: the target distributions, or the target's warped logits if
            the verifier needs no distributions. :attr:`p_BNV` reads it.
        verdict: what was accepted.
        emitted_BK: the emitted tokens; row b emits its first ``num_accepted + 1``.
        verified_by_logits: whether ``p`` holds logits instead of distributions.
        overlap: estimates of α from this draft, if the verification computed them.
        dead_BN: at which nodes sampling parameters and processors left no token to sample; None if
            the distribution does not report any.
        counts: what the statistics count, if the verification computed it.
    """

    proposed: Draft
    draft: Draft
    scores: Scores
    p: Deferred
    verdict: Verdict
    emitted_BK: Tensor
    verified_by_logits: bool
    overlap: "Overlap | None" = None
    dead_BN: Tensor | None = None
    counts: DraftCounts | None = None

    @property
    def p_BNV(self) -> Tensor:
        """The input of the verifier at every node."""
        return self.p.value


class Overlap(NamedTuple):
    """What a round's draft says of α = E[Σ_x min(p, q)], by depth (``engine/round_counts.py``).

    Attributes:
        reached_BD: the probability that token-level rejection sampling reaches the position; 0
            where nothing was drafted.
        overlap_BD: that probability times an unbiased estimate of Σ_x min(p, q) at the position.
    """

    reached_BD: Tensor
    overlap_BD: Tensor


class Verification(NamedTuple):
    """The result of verifying a draft; attributes as in :class:`Round`."""

    draft: Draft
    p: Deferred
    verdict: Verdict
    emitted_BK: Tensor
    overlap: Overlap | None = None
    dead_BN: Tensor | None = None
    counts: DraftCounts | None = None

    @property
    def p_BNV(self) -> Tensor:
        """The input of the verifier at every node."""
        return self.p.value


class VerificationExecutor(Protocol):
    """Applies a verification rule to a draft: eagerly, or as a compiled program."""

    def __call__(
        self, verifier: Verifier, draft: Draft, scores: Scores, context: Context, rng: Stream
    ) -> Verification:
        """Warps the target's logits, verifies the draft, and collects the emitted tokens."""


def start_batch(context: Context, target: Model[Any], drafter: Drafter[Any]) -> tuple[Any, Any]:
    """Reads the prompts; returns the target's cache and the drafter's state."""
    if not drafter.capabilities.hidden_layers:
        return target.start(context), drafter.start(context)
    state = drafter.start(context)
    sharing = cast(SharesHiddenStates, target)
    return sharing.start(context, prompt_reader(drafter, state, context)), state


def prompt_reader(drafter: Drafter[Any], state: Any, context: Context) -> ReadHidden:
    """What takes the hidden states of the prompts for a drafter that declares
    ``Capabilities.hidden_layers``.

    Raises:
        IncompatibleError: the drafter cannot read them.
    """
    if not isinstance(drafter, ReadsHiddenStates):
        raise IncompatibleError(
            f"{type(drafter).__name__} declares hidden_layers but has no read_prompt: see "
            f"ReadsHiddenStates"
        )
    return partial(drafter.read_prompt, state, context)


def run_round(
    context: Context,
    target: Model[Any],
    cache: Any,
    drafter: Drafter[Any],
    state: Any,
    verifier: Verifier,
    budget: Budget,
    verification: VerificationExecutor | None = None,
) -> Round:
    """Propose, score, verify. Commits nothing.

    The caller reads the round's numbers from the device, which is the one synchronisation of a
    round, and then calls :func:`commit_round`.
    """
    rng = context.rng
    proposed = drafter.propose(state, context, budget, rng)
    scores = target.score(cache, proposed)
    found = (verification or verify_eagerly)(verifier, proposed, scores, context, rng)
    by_logits = verifier.needs != "distribution"
    return Round(
        proposed,
        found.draft,
        scores,
        found.p,
        found.verdict,
        found.emitted_BK,
        by_logits,
        found.overlap,
        found.dead_BN,
        found.counts,
    )


def commit_round(
    context: Context,
    target: Model[Any],
    cache: Any,
    drafter: Drafter[Any],
    state: Any,
    round_: Round,
    num_accepted: Sequence[int],
) -> None:
    """Keeps what a round accepted, everywhere: in the target's cache, in the drafter's state and in
    the context. Mutates all three.

    Args:
        context: the batch, as :func:`run_round` had it; likewise the target, the drafter and their
            states.
        round_: what :func:`run_round` returned.
        num_accepted: ``round_.verdict.num_accepted_B``, read from the device.
    """
    verdict = round_.verdict.read(num_accepted)
    target.commit(cache, round_.proposed, verdict)
    drafter.commit(state, round_.proposed, verdict, round_.scores)
    context.append(round_.emitted_BK, verdict.num_emitted)


def keep_accepted(state: SequenceState, draft: Draft, verdict: Acceptance) -> None:
    """Keeps the root and the accepted path in a state whose model has run over the query
    tokens of a draft (``draft.query_tokens``; of a chain, its nodes)."""
    if draft.is_chain:
        state.append(verdict.num_emitted)
    else:
        state.select(draft.query_tokens.index_BN.gather(1, verdict.path_BD), verdict.num_accepted)


def verify_eagerly(
    verifier: Verifier, draft: Draft, scores: Scores, context: Context, rng: Stream
) -> Verification:
    """Verifies any draft by any rule, in eager mode.

    Nodes that follow an end token are removed from the draft first, so that neither processors nor
    the rule see prefixes that plain decoding would never produce.
    """
    if context.ends is not None:
        draft = context.ends.cut(draft)
    distribution = (
        context.distribution if verifier.needs == "distribution" else context.distribution.logits
    )
    prefix = Prefix.of_draft(context, draft)
    p_BNV = distribution(scores.logits_BNV, prefix)
    bind: BindLogits | None = getattr(verifier, "with_raw_logits", None)
    if bind is not None:
        verifier = bind(scores.logits_BNV)
    verdict, p = verifier(draft, p_BNV, rng), Deferred.known(p_BNV)
    return Verification(draft, p, verdict, verdict.emitted(draft), dead_BN=prefix.dead_BM)


def check_compatible(drafter: Drafter[Any], verifier: Verifier) -> None:
    """Raises IncompatibleError if the verifier's rule is not valid for the drafter's drafts."""
    if drafter.drawn not in verifier.accepts:
        raise IncompatibleError(
            f"{type(verifier).__name__} cannot verify {drafter.drawn!r} drafts of "
            f"{type(drafter).__name__}; it accepts {sorted(verifier.accepts)}"
        )
