"""Runs the checks of a certificate one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.core import Drafter, Model, Verifier, check_compatible
from outrider.lab.certify import (
    counts,
    greedy,
    observed_rounds,
    positions,
    rounds,
    two_sample,
)
from outrider.lab.certify.pair import GuardedRule, Pair, RuleError, continuations
from outrider.lab.certify.report import Certificate, Check
from outrider.testing import DistributionFactory

_REQUESTS_PER_CHECK = 1 << 24  # every check has its own range of request numbers


def certify(
    target: Model[Any],
    drafter: Drafter[Any],
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    distribution: DistributionFactory,
    num_tokens: int = 5,
    *,
    num_positions: int = 256,
    num_samples: int = 1024,
    length: int = 4,
    seed: int = 0,
    device: torch.device | str = "cpu",
    limit: int | None = None,
    batch_size: int = 128,
    progress: Callable[[str], None] = lambda stage: None,
) -> Certificate:
    """Checks a drafter and a verification rule on a target; the package lists the checks.

    Args:
        target: the model whose distribution must be preserved.
        drafter: the source of drafts.
        verifier: the rule, with the claim that it makes.
        prompts: token ids, at least one prompt.
        distribution: makes the sampling distribution for a number of rows. If it is greedy, the
            greedy check runs.
        num_tokens: γ.
        num_positions: drafted positions whose distributions are compared.
        num_samples: continuations by the method, and as many by plain decoding, over all prompts.
        length: tokens of a continuation.
        seed: of all requests.
        device: where contexts are built.
        limit: longest context in tokens; None if there is none.
        batch_size: rows that run at the same time.
        progress: called with the name of each check before it runs.

    Raises:
        OutriderError: the pair cannot run, for example because the rule cannot verify the drafts.
    """
    check_compatible(drafter, verifier)
    rule = GuardedRule(verifier)
    pair = Pair(target, drafter, rule, distribution, num_tokens, seed, device, limit, batch_size)
    checks: list[Check] = []
    is_greedy = distribution(1).greedy

    def attempt(name: str, run: Callable[[], Check]) -> None:
        progress(name)
        try:
            checks.append(run())
        except RuleError as error:
            checks.append(Check(name, False, None, str(error)))

    drafted: positions.DraftedPositions | None = None

    def states() -> Check:
        nonlocal drafted
        drafted, check = observed_rounds.observe(pair, prompts, num_positions)
        return check

    attempt(observed_rounds.STATES, states)
    if not is_greedy:
        attempt(positions.NAME, lambda: positions.check(verifier, drafter.drawn, drafted))
    attempt(rounds.NAME, lambda: rounds.check(verifier, drafter.drawn, drafted))
    if is_greedy:
        room = 16 * length if limit is None else limit - max(map(len, prompts))
        longer = max(1, min(16 * length, room))
        first = _REQUESTS_PER_CHECK
        attempt(greedy.NAME, lambda: greedy.check(pair, prompts, longer, first, verifier.lossless))
        return _certificate(verifier, True, checks)

    per_prompt = -(-num_samples // len(prompts))
    attempt(
        counts.DRAFTS, lambda: counts.check_drafts(pair, prompts, per_prompt, _REQUESTS_PER_CHECK)
    )
    if not per_prompt:
        return _certificate(verifier, False, checks)
    by_method: list[torch.Tensor] = []
    by_plain: list[torch.Tensor] = []

    def tokens() -> Check:
        for index, prompt in enumerate(prompts):
            first = 2 * _REQUESTS_PER_CHECK + index * per_prompt
            by_method.append(continuations(pair, prompt, per_prompt, length, first))
        return counts.check_tokens(pair, prompts, by_method, verifier.lossless)

    def outputs() -> Check:
        if len(by_method) < len(prompts):
            return Check.skipped(two_sample.NAME, "the method produced no continuations")
        for index, prompt in enumerate(prompts):
            first = 3 * _REQUESTS_PER_CHECK + index * per_prompt
            by_plain.append(continuations(pair.plain(), prompt, per_prompt, length, first))
        return two_sample.check(by_method, by_plain, verifier.lossless)

    attempt(counts.TOKENS, tokens)
    attempt(two_sample.NAME, outputs)
    return _certificate(verifier, False, checks)


def _certificate(verifier: Verifier, is_greedy: bool, checks: list[Check]) -> Certificate:
    return Certificate(
        type(verifier).__name__,
        verifier.bound.words,
        verifier.lossless,
        is_greedy,
        checks,
    )
