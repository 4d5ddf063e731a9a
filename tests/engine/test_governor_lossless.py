"""ENUM: rounds under a governor have exactly the target's distribution, although the second round's
length depends on what the first one accepted, or on the probabilities of its draft, rejected tokens
included.

The governor is a real one; its times are given. Each outcome of the first round is learned by a
copy of it, which then chooses the length of the second round after that outcome.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, product
from math import prod
from operator import mul
from typing import Any

import pytest
import torch

from outrider.core import Budget, Context, Draft, Prefix, Stream, Verifier
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.sources import Sources
from outrider.testing import (
    DistributionFactory,
    SoftmaxDistribution,
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
LOW, HIGH = [0.2, 0.2], [0.8, 0.8]  # min(1, p/q) of drafted tokens


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

    def after(self, accepted: int, ratios: Sequence[float] = ()) -> "Choosing":
        """A copy that has seen the coming round accept so many tokens, of a draft whose tokens have
        these min(1, p/q), if they are given."""
        other = copy.deepcopy(self)
        asked, draft = other._asked, 0.3 * other.length
        overlap = list(accumulate(ratios, mul))
        overlaps = [([1.0, *overlap[:-1]], overlap)] if ratios else []
        other._batch.learn(
            *(asked, other._rows, [accepted], False, draft, 1.0 + 1.1 * draft), overlaps=overlaps
        )
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


class GivenDraft(ToyDrafter):
    """Drafts given tokens, as if they had been drawn."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(DRAFT)
        self._tokens = tokens

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        num, q = context.num_rows, SoftmaxDistribution()
        prefix = Prefix.of_chain(context, ())
        tokens, rows, past_B = [context.root_B], [], state.past_B
        for token in (*self._tokens, 0):
            past_B = self.model.read(past_B, tokens[-1])
            rows.append(q(self.model.logits(past_B)[:, None], prefix)[:, 0])
            tokens.append(torch.full((num,), token))
        tokens_BN, mask_BN = torch.stack(tokens[:-1], 1), torch.ones(num, len(rows)).bool()
        return Draft.chain(tokens_BN, mask_BN, torch.stack(rows, 1), "iid")


def probabilities(model: ToyModel, tokens: Sequence[int]) -> list[float]:
    """Of each token after the prompt."""
    past, found = torch.zeros(1, dtype=torch.int64), []
    for token in PROMPT:
        past = model.read(past, torch.tensor([token]))
    for token in tokens:
        found.append(float(model.logits(past).softmax(-1)[0, token]))
        past = model.read(past, torch.tensor([token]))
    return found


def test_a_length_that_depends_on_the_draft_itself() -> None:
    """The governor learns from min(1, p/q) of tokens that were rejected, too."""
    first = practised()
    while not first.length or first.after(0, LOW).length == first.after(0, HIGH).length:
        first = first.after(min(first.length, 1), HIGH[: first.length])
    emitted: Counter[tuple[int, ...]] = Counter()
    lengths: dict[int, set[int]] = {}
    for drafted in product(range(TARGET.vocab_size), repeat=first.length):
        p, q = probabilities(TARGET, drafted), probabilities(DRAFT, drafted)
        ratios = [min(1.0, a / b) for a, b in zip(p, q, strict=True)]
        one = enumerate_round(TARGET, GivenDraft(drafted), Rejection(), first.length, prompt=PROMPT)
        for tokens, mass in one.emitted.items():
            length = first.after(len(tokens) - 1, ratios).length
            lengths.setdefault(len(tokens), set()).add(length)
            second = enumerate_round(
                TARGET, ToyDrafter(DRAFT), Rejection(), length, prompt=(*PROMPT, *tokens)
            )
            for more, share in second.emitted.items():
                emitted[tokens + more] += prod(q) * mass * share
    assert any(len(found) > 1 for found in lengths.values())  # the same outcome, another draft
    both = complete(TARGET, dict(emitted), PROMPT, 2 * (MOST + 1))
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-12)
    assert both.total_variation < 1e-12


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
