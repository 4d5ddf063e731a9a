"""ENUM: rounds under a governor have exactly the target's distribution, although the second round's
length depends on what the first one accepted.

The governor is a real one; its times are given. Each outcome of the first round is learned by a
copy of it, which then chooses the length of the second round after that outcome.
"""

import copy
from collections import Counter
from contextlib import nullcontext

import pytest

from outrider.core import Verifier
from outrider.engine.governor.acceptance import RowMemory
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.sources import Sources
from outrider.testing import (
    DistributionFactory,
    ToyDrafter,
    ToyModel,
    complete,
    enumerate_round,
    greedy_distribution,
    softmax_distribution,
)
from outrider.verifiers import Block, Rejection

TARGET, DRAFT = ToyModel.random(3, seed=41), ToyModel.random(3, seed=42)
PROMPT = (0, 1)
MOST = 2


class Choosing:
    """A governor of one row on a machine whose rounds take given times."""

    def __init__(self) -> None:
        governor = Governor(Sources(lengths=tuple(range(MOST + 1))))
        governor.lock = nullcontext()  # a lock cannot be copied
        self._batch = BatchGovernor(governor)
        self._rows = [RowMemory(False)]
        self._asked = self._ask()

    @property
    def length(self) -> int:
        """The length of the coming round."""
        return self._asked.length

    def after(self, accepted: int) -> "Choosing":
        """A copy that has seen the coming round accept so many tokens."""
        other = copy.deepcopy(self)
        asked, draft = other._asked, 0.3 * other.length
        other._batch.learn(asked, other._rows, [accepted], False, draft, 1.0 + 1.1 * draft)
        other._asked = other._ask()
        return other

    def _ask(self) -> Asked:
        return self._batch.ask(self._rows, [MOST], False)


def practised() -> Choosing:
    """A governor that has seen tokens accepted and rejected, so that one more outcome decides."""
    choosing = Choosing()
    for number in range(25):
        choosing = choosing.after(min(choosing.length, 1 if number % 3 == 0 else 0))
    while not choosing.length or choosing.after(0).length == choosing.after(choosing.length).length:
        choosing = choosing.after(min(choosing.length, 1))
    return choosing


@pytest.mark.parametrize("rule", [Rejection(), Block()])
@pytest.mark.parametrize("distribution", [softmax_distribution, greedy_distribution])
def test_two_rounds_have_the_targets_distribution(
    rule: Verifier, distribution: DistributionFactory
) -> None:
    drafter, first = ToyDrafter(DRAFT), practised()
    assert first.after(0).length != first.after(first.length).length
    emitted: Counter[tuple[int, ...]] = Counter()
    one = enumerate_round(
        TARGET, drafter, rule, first.length, prompt=PROMPT, distribution=distribution
    )
    for tokens, mass in one.emitted.items():
        second = enumerate_round(
            TARGET,
            drafter,
            rule,
            first.after(len(tokens) - 1).length,
            prompt=(*PROMPT, *tokens),
            distribution=distribution,
        )
        for more, share in second.emitted.items():
            emitted[tokens + more] += mass * share
    both = complete(TARGET, dict(emitted), PROMPT, 2 * (MOST + 1), distribution)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
    assert both.total_variation < 1e-12
