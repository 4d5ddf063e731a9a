"""The checks, one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.core import Drafter, Model, Verifier, check_compatible
from outrider.lab.certify import counts, greedy, positions, rides, rounds, two_sample
from outrider.lab.certify.pair import Guarded, Pair, RuleError, continuations
from outrider.lab.certify.report import Certificate, Check
from outrider.testing import DistributionFactory

_APART = 1 << 24  # request numbers of different checks do not meet


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
    """Checks a drafter and a rule on a target; see the module.

    Args:
        target: the model whose distribution counts.
        drafter: the source of drafts.
        verifier: the rule, and what it claims.
        prompts: token ids, at least one prompt.
        distribution: makes the sampling distribution of that many rows; a greedy one chooses the
            greedy check.
        num_tokens: γ.
        num_positions: places whose distributions are compared.
        num_samples: texts by the method, and as many by plain decoding, over all prompts.
        length: tokens of a text.
        seed: of all draws.
        device: where contexts are built.
        limit: longest context in tokens; None if there is none.
        batch_size: rows that run at the same time.
        progress: told what comes next.

    Raises:
        OutriderError: a pair that cannot run, such as a rule that cannot verify the drafter.
    """
    check_compatible(drafter, verifier)
    rule = Guarded(verifier)
    pair = Pair(target, drafter, rule, distribution, num_tokens, seed, device, limit, batch_size)
    checks: list[Check] = []
    is_greedy = distribution(1).greedy

    def attempt(name: str, run: Callable[[], Check]) -> None:
        progress(name)
        try:
            checks.append(run())
        except RuleError as error:
            checks.append(Check(name, False, None, str(error)))

    places: list[positions.Places | None] = [None]

    def ride() -> Check:
        places[0], states = rides.sample(pair, prompts, num_positions)
        return states

    attempt(rides.STATES, ride)
    if not is_greedy:
        attempt(positions.NAME, lambda: positions.check(verifier, drafter.drawn, places[0]))
    attempt(rounds.NAME, lambda: rounds.check(verifier, drafter.drawn, places[0]))
    if is_greedy:
        room = 16 * length if limit is None else limit - max(map(len, prompts))
        longer = max(1, min(16 * length, room))
        attempt(greedy.NAME, lambda: greedy.check(pair, prompts, longer, _APART, verifier.lossless))
        return _certificate(verifier, True, checks)

    each = -(-num_samples // len(prompts))
    attempt(counts.DRAFTS, lambda: counts.check_drafts(pair, prompts, each, _APART))
    if not each:
        return _certificate(verifier, False, checks)
    ours: list[torch.Tensor] = []
    plains: list[torch.Tensor] = []

    def tokens() -> Check:
        for round_, prompt in enumerate(prompts):
            first = 2 * _APART + round_ * each
            ours.append(continuations(pair, prompt, each, length, first))
        return counts.check_tokens(pair, prompts, ours, verifier.lossless)

    def texts() -> Check:
        if len(ours) < len(prompts):
            return Check.skipped(two_sample.NAME, "the method wrote no texts")
        for round_, prompt in enumerate(prompts):
            first = 3 * _APART + round_ * each
            plains.append(continuations(pair.plain(), prompt, each, length, first))
        return two_sample.check(ours, plains, verifier.lossless)

    attempt(counts.TOKENS, tokens)
    attempt(two_sample.NAME, texts)
    return _certificate(verifier, False, checks)


def _certificate(verifier: Verifier, is_greedy: bool, checks: list[Check]) -> Certificate:
    return Certificate(
        type(verifier).__name__,
        verifier.bound.words,
        verifier.lossless,
        is_greedy,
        checks,
    )
