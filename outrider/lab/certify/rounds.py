"""Whole rounds by enumeration: on distributions of the pair, coarsened, and on toys that hide
nothing.

A place at a time does not show everything: a rule may verify a path as a whole, take the bonus
token from the wrong distribution, use one random number twice, or mistreat siblings. Here the rule
runs complete rounds on small models whose distribution is known exactly. Some of them are tables of
distributions that the pair itself produced, three classes each: the two tokens that matter most,
and the rest. A rule that does not refuse trees is taken to claim them, and is given some.

Legend: B rows, N nodes, K columns emitted, S sequences, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Bound, Budget, Context, Drawn, Prefix, Role, Stream, Verifier
from outrider.core.errors import IncompatibleError
from outrider.lab.certify.pair import Guarded, RuleError
from outrider.lab.certify.positions import Places, held
from outrider.lab.certify.report import FALSE_ALARM, STATISTICAL_CHECKS, Check, rounded_up
from outrider.lab.certify.toys import OWN, Case, cases
from outrider.lab.certify.two_sample import findable
from outrider.testing import (
    DistributionFactory,
    RoundDistribution,
    ScriptedStream,
    chi2,
    enumerate_round,
    greedy_distribution,
    softmax_distribution,
)

NAME = "rounds"
_ALLOWED = 1e-6  # a rule may compute in float32, though these distributions are float64
_SAMPLES = 50_000
_ROWS = 256


def check(verifier: Verifier, drawn: Drawn, places: Places | None) -> Check:
    """Runs every case; the largest total variation, or a lossy rule's divergence.

    Args:
        verifier: the rule.
        drawn: how the drafts come about that it has to verify.
        places: distributions of the pair; None if there are none.
    """
    if verifier.needs == "logits":
        return Check.skipped(NAME, "the rule verifies logits of the draft model; toys have none")
    verifier = Guarded(verifier)
    distribution: DistributionFactory = (
        softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    )
    tried = list(cases(drawn, places))
    if not _scriptable(verifier, tried[0]):
        return _frequencies(verifier, tried)
    worst, where, count, apart = 0.0, "", 0, 0
    lossy: list[Check] = []
    for case in tried:
        try:
            found = enumerate_round(
                case.target,
                case.drafter,
                verifier,
                2,
                prompt=case.prompt,
                distribution=distribution,
            )
        except IncompatibleError:  # one path only
            continue
        except (AssertionError, RuleError):  # no threshold rule; a shape that it does not verify
            apart += 1
            continue
        count += 1
        if not verifier.lossless:
            lossy += _lossy(verifier.bound, found, case.name)
        elif found.total_variation > worst or not where:
            worst, where = found.total_variation, case.name
        if verifier.lossless and case.name == OWN:
            longest = max(len(tokens) for tokens, mass in found.emitted.items() if mass > 0)
            if longest < 3:
                words = f"a draft of 2 never yields more than {longest} tokens: no bonus token"
                return Check(NAME, False, None, words)
    if not count:
        return _frequencies(verifier, tried)
    if verifier.lossless and _takes_the_impossible(verifier, tried):
        words = "with random numbers at their limits, it emits a token of probability zero"
        return Check(NAME, False, worst, words)
    left = f"; {apart} shapes could not be enumerated" if apart else ""
    if lossy:
        return _worst(lossy, count)
    words = f"TV of the emitted tokens, {count} enumerations, worst: {where}; allowed {_ALLOWED:g}"
    claim = f"TV of whole rounds ≤ {rounded_up(worst)} by enumeration on small vocabularies"
    return Check(NAME, worst <= _ALLOWED, worst, words + left, claim)


def _worst(checks: list[Check], count: int) -> Check:
    failed = [check for check in checks if check.passed is False]
    first = [check for check in checks if "first token" in check.words]
    worst = max(failed or first, key=lambda check: check.number or 0.0)
    return Check(
        NAME, worst.passed, worst.number, f"{worst.words} ({count} enumerations)", worst.claim
    )


def _lossy(bound: Bound, found: RoundDistribution, name: str) -> list[Check]:
    """The first token against the bound, and all tokens together against the bound for so many."""
    V = round(len(found.target_S) ** (1 / found.length))
    whole = replace(bound, per_token=bound.per_sequence(found.length))
    p_1S, pi_1S = found.target_S[None], found.completed_S[None]
    p_1V, pi_1V = p_1S.view(1, V, -1).sum(2), pi_1S.view(1, V, -1).sum(2)
    return [
        held(NAME, bound, p_1V, pi_1V, f"of the first token, {name}"),
        held(NAME, whole, p_1S, pi_1S, f"of {found.length} tokens, {name}"),
    ]


def _scriptable(verifier: Verifier, case: Case) -> bool:
    """Whether the verdict depends on the stream's uniform numbers alone, and not on its keys."""
    rng = Stream(*torch.arange(2 * _ROWS).split(_ROWS))
    numbers = {role: rng.uniform(role, 64) for role in Role}
    try:
        emitted = [_verification(verifier, case, numbers, first)[0] for first in (0, 1 << 20)]
    except RuleError as error:  # noise at other places, or a shape that is not verified
        return not isinstance(error.__cause__, NotImplementedError)
    return bool((emitted[0] == emitted[1]).all())


def _takes_the_impossible(verifier: Verifier, tried: list[Case]) -> bool:
    """Whether any constant random numbers make it emit a token that the target never emits."""
    for case in tried:
        if case.drafter.width > 1:
            continue
        for accept in (0.0, 1 - 2.0**-52):
            for other in (0.0, 1 - 2.0**-52):
                numbers = {
                    role: torch.full(
                        (_ROWS, 64), accept if role == Role.ACCEPT else other, dtype=torch.float64
                    )
                    for role in Role
                }
                try:
                    emitted_BK, p_BNV = _verification(verifier, case, numbers, 0)
                except RuleError:
                    continue
                p_BK = p_BNV.gather(2, emitted_BK.clamp(min=0)[..., None])[..., 0]
                if bool(((emitted_BK >= 0) & (p_BK <= 0)).any()):
                    return True
    return False


def _verification(
    verifier: Verifier, case: Case, numbers: dict[Role, Tensor], first_key: int
) -> tuple[Tensor, Tensor]:
    """Tokens emitted for drafts from many prompts, -1 beyond the last, and the target's
    distributions."""
    distribution = softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    prompts = [[b % 3, b // 3 % 3, b // 9 % 3, b // 27 % 3] for b in range(_ROWS)]
    context = Context.start(prompts, distribution(_ROWS), [0] * _ROWS, range(_ROWS))
    state = case.drafter.start(context)
    draft = case.drafter.propose(state, context, Budget(2), context.rng)
    logits_BNV = case.target.score(case.target.start(context), draft).logits_BNV
    p_BNV = context.distribution(logits_BNV, Prefix.of_draft(context, draft))
    key_B = torch.arange(first_key, first_key + _ROWS)
    verdict = verifier(draft, p_BNV, ScriptedStream(key_B, context.length_B, numbers))
    emitted_BK = verdict.emitted(draft)
    column_K = torch.arange(emitted_BK.shape[1])
    return torch.where(column_K <= verdict.num_accepted_B[:, None], emitted_BK, -1), p_BNV


def _frequencies(verifier: Verifier, tried: list[Case]) -> Check:
    """The real sampler on the same toys, by counting, where a rule cannot be enumerated."""
    why = "noise of its own, not enumerable"
    if not verifier.lossless:
        return Check.skipped(NAME, why)
    threshold = FALSE_ALARM / STATISTICAL_CHECKS
    distribution = softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    worst, count, length = 1.0, 0, 3
    degrees = tried[0].target.vocab_size ** length - 1
    for case in tried[1:]:
        try:
            p_value = chi2(
                case.target,
                case.drafter,
                verifier,
                2,
                length=length,
                num_rows=_SAMPLES,
                prompt=case.prompt,
                distribution=distribution,
            )
        except (IncompatibleError, RuleError):
            continue
        count += 1
        worst = min(worst, p_value)
    if not count:
        return Check.skipped(NAME, f"{why}, and verifies none of the shapes tried")
    words = f"least p-value of {count} counts of {_SAMPLES} rounds each ({why})"
    # one sample of n against exact probabilities: λ >= 4 n δ², as two samples of 2 n
    found = findable(2 * _SAMPLES, degrees, threshold / count)
    claim = f"deviation of whole rounds > {found:.2g} on small vocabularies would have been found"
    return Check(NAME, worst * count > threshold, worst, words, claim)
