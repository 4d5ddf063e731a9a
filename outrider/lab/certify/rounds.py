"""The check of whole rounds: enumerates them on small models with known distributions.

Single positions do not show every mistake. A rule may verify a path as a whole, draw the bonus
token from the wrong distribution, use a random number twice, or mishandle siblings. Here the rule
runs complete rounds on toy models, and on tables of distributions that the pair itself produced,
coarsened to three classes: the two tokens that matter most, and the rest. A rule that raises no
error for a tree is taken to support trees and is checked on them.

Legend: B rows, N nodes, K tokens emitted, S sequences, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Bound, Budget, Context, Drawn, Prefix, Role, Stream, Verifier
from outrider.core.errors import IncompatibleError
from outrider.lab.certify.pair import GuardedRule, RuleError
from outrider.lab.certify.positions import DraftedPositions, check_bound
from outrider.lab.certify.report import FALSE_ALARM, STATISTICAL_CHECKS, Check, rounded_up
from outrider.lab.certify.toys import OWN, Case, cases
from outrider.lab.certify.two_sample import detectable_deviation
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
_ALLOWED = 1e-6  # TV; the distributions are float64, but a rule may compute in float32
_SAMPLES = 50_000
_ROWS = 256


def check(verifier: Verifier, drawn: Drawn, positions: DraftedPositions | None) -> Check:
    """Enumerates every case and reports the largest total variation, or a lossy rule's divergence.

    Args:
        verifier: the rule.
        drawn: how the drafts that it verifies are obtained.
        positions: distributions of the pair; None if there are none.
    """
    if verifier.needs == "logits":
        return Check.skipped(NAME, "the rule reads the draft model's logits; toys have none")
    verifier = GuardedRule(verifier)
    distribution: DistributionFactory = (
        softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    )
    toys = list(cases(drawn, positions))
    if not _depends_on_uniforms_only(verifier, toys[0]):
        return _frequencies(verifier, toys)
    worst, where, count, failed = 0.0, "", 0, 0
    lossy: list[Check] = []
    for case in toys:
        try:
            enumerated = enumerate_round(
                case.target,
                case.drafter,
                verifier,
                2,
                prompt=case.prompt,
                distribution=distribution,
            )
        except IncompatibleError:  # the rule verifies chains only
            continue
        except (AssertionError, RuleError):  # not a threshold rule, or it fails on this shape
            failed += 1
            continue
        count += 1
        if not verifier.lossless:
            lossy += _lossy(verifier.bound, enumerated, case.name)
        elif enumerated.total_variation > worst or not where:
            worst, where = enumerated.total_variation, case.name
        if verifier.lossless and case.name == OWN:
            longest = max(len(tokens) for tokens, mass in enumerated.emitted.items() if mass > 0)
            if longest < 3:
                words = f"a draft of 2 never yields more than {longest} tokens: no bonus token"
                return Check(NAME, False, None, words)
    if not count:
        return _frequencies(verifier, toys)
    if verifier.lossless and _emits_impossible_tokens(verifier, toys):
        words = "with random numbers at their limits, it emits a token of probability zero"
        return Check(NAME, False, worst, words)
    skipped = f"; {failed} shapes could not be enumerated" if failed else ""
    if lossy:
        return _worst(lossy, count)
    words = f"TV of the emitted tokens, {count} enumerations, worst: {where}; allowed {_ALLOWED:g}"
    claim = f"TV of whole rounds ≤ {rounded_up(worst)} by enumeration on small vocabularies"
    return Check(NAME, worst <= _ALLOWED, worst, words + skipped, claim)


def _worst(checks: list[Check], count: int) -> Check:
    """The failed check with the largest number; without one, the largest of the first token."""
    failed = [check for check in checks if check.passed is False]
    first = [check for check in checks if "first token" in check.words]
    worst = max(failed or first, key=lambda check: check.number or 0.0)
    return Check(
        NAME, worst.passed, worst.number, f"{worst.words} ({count} enumerations)", worst.claim
    )


def _lossy(bound: Bound, enumerated: RoundDistribution, name: str) -> list[Check]:
    """Compares the first token with the bound per token, and all tokens with that per sequence."""
    length = enumerated.length
    V = round(len(enumerated.target_S) ** (1 / length))
    whole = replace(bound, per_token=bound.per_sequence(length))
    p_1S, pi_1S = enumerated.target_S[None], enumerated.completed_S[None]
    p_1V, pi_1V = p_1S.view(1, V, -1).sum(2), pi_1S.view(1, V, -1).sum(2)
    return [
        check_bound(NAME, bound, p_1V, pi_1V, f"of the first token, {name}"),
        check_bound(NAME, whole, p_1S, pi_1S, f"of {length} tokens, {name}"),
    ]


def _depends_on_uniforms_only(verifier: Verifier, case: Case) -> bool:
    """Whether the verdict depends on the stream's uniform numbers, and not on its keys."""
    rng = Stream(*torch.arange(2 * _ROWS).split(_ROWS))
    numbers = {role: rng.uniform(role, 64) for role in Role}
    try:
        emitted = [_emitted(verifier, case, numbers, first)[0] for first in (0, 1 << 20)]
    except RuleError as error:  # it draws other random numbers, or fails on this shape
        return not isinstance(error.__cause__, NotImplementedError)
    return bool((emitted[0] == emitted[1]).all())


def _emits_impossible_tokens(verifier: Verifier, toys: list[Case]) -> bool:
    """Whether random numbers at their limits make it emit a token that the target never emits."""
    for case in toys:
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
                    emitted_BK, p_BNV = _emitted(verifier, case, numbers, 0)
                except RuleError:
                    continue
                p_BK = p_BNV.gather(2, emitted_BK.clamp(min=0)[..., None])[..., 0]
                if bool(((emitted_BK >= 0) & (p_BK <= 0)).any()):
                    return True
    return False


def _emitted(
    verifier: Verifier, case: Case, numbers: dict[Role, Tensor], first_key: int
) -> tuple[Tensor, Tensor]:
    """Runs the rule on drafts from many prompts.

    Returns:
        The emitted tokens, (B, K), filled with -1; and the target's distributions, (B, N, V).
    """
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
    index_K = torch.arange(emitted_BK.shape[1])
    return torch.where(index_K <= verdict.num_accepted_B[:, None], emitted_BK, -1), p_BNV


def _frequencies(verifier: Verifier, toys: list[Case]) -> Check:
    """Runs and counts rounds on the same toys, for a rule that cannot be enumerated."""
    why = "the rule draws noise of its own, so it is not enumerable"
    if not verifier.lossless:
        return Check.skipped(NAME, why)
    threshold = FALSE_ALARM / STATISTICAL_CHECKS
    distribution = softmax_distribution if verifier.needs == "distribution" else greedy_distribution
    worst, count, length = 1.0, 0, 3
    degrees = toys[0].target.vocab_size ** length - 1
    for case in toys[1:]:
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
        return Check.skipped(NAME, f"{why}, and it verifies none of the shapes tried")
    words = f"smallest p-value of {count} counts of {_SAMPLES} rounds each ({why})"
    # One sample of n against exact probabilities has λ >= 4 n δ², like two samples of 2 n each.
    detectable = detectable_deviation(2 * _SAMPLES, degrees, threshold / count)
    claim = f"deviation of whole rounds > {detectable:.2g} on small vocabularies would be found"
    return Check(NAME, worst * count > threshold, worst, words, claim)
