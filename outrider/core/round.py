"""One round of speculative decoding: the loop of every method is a repetition of this.

Legend: B rows, N nodes, K columns emitted (depth + 1), V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.core.context import Context, Prefix
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import IncompatibleError
from outrider.core.protocols import Budget, Drafter, Model, Scores, Verifier

Reading = Callable[[Tensor], Verifier]
"""``ReadsLogits.reading``, by name: to ask whether an object follows a protocol takes longer."""


@dataclass(frozen=True)
class Round:
    """Everything a round decided, still on the device.

    Attributes:
        draft: what was proposed.
        scores: the target's raw logits at the nodes.
        p_BNV: what the verifier judged by: the target's laws, or its warped logits where the
            verifier needs no laws.
        verdict: what was accepted.
        emitted_BK: the tokens; row b emitted its first ``num_accepted + 1``.
        judged_by_logits: whether ``p_BNV`` holds logits only.
    """

    draft: Draft
    scores: Scores
    p_BNV: Tensor
    verdict: Verdict
    emitted_BK: Tensor
    judged_by_logits: bool


def run_round(
    context: Context,
    target: Model[Any],
    cache: Any,
    drafter: Drafter[Any],
    state: Any,
    verifier: Verifier,
    budget: Budget,
) -> Round:
    """Propose, score, verify, commit. Mutates ``context``, ``cache`` and ``state``.

    The caller reads the verdict from the device (the one synchronisation of a round) and then
    calls ``context.advance``.
    """
    rng = context.rng
    draft = drafter.propose(state, context, budget, rng)
    scores = target.score(cache, draft)
    law = context.law if verifier.needs == "law" else context.law.logits
    p_BNV = law(scores.logits_BNV, Prefix.of_draft(context, draft))
    reading: Reading | None = getattr(verifier, "reading", None)
    if reading is not None:
        verifier = reading(scores.logits_BNV)
    verdict = verifier(draft, p_BNV, rng)
    target.commit(cache, draft, verdict)
    drafter.commit(state, draft, verdict, scores)
    emitted_BK = verdict.emitted(draft)
    context.append(emitted_BK, verdict.num_accepted_B + 1)
    return Round(draft, scores, p_BNV, verdict, emitted_BK, verifier.needs != "law")


def check_compatible(drafter: Drafter[Any], verifier: Verifier) -> None:
    """Raises IncompatibleError when the verifier's rule does not hold for the drafter's draws."""
    if drafter.drawn not in verifier.accepts:
        raise IncompatibleError(
            f"{type(verifier).__name__} cannot judge {drafter.drawn!r} drafts of "
            f"{type(drafter).__name__}; it accepts {sorted(verifier.accepts)}"
        )
