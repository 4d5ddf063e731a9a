"""Rounds: rows alone and in batches, plain and speculative."""

import pytest
import torch

from outrider.core import Budget, Context, commit_round, run_round
from outrider.sampling import Sampling, Warp
from outrider.testing import ToyDrafter, ToyModel
from outrider.verifiers import Greedy, Rejection

TARGET = ToyModel.random(4, seed=1)
GUESS = ToyModel.random(4, seed=2)
PROMPTS = [[0], [1, 2, 3, 0], [2, 2], [3, 1, 1]]


def generate(rows, drafter, verifier, budgets, samplings, length=20):
    """``length`` tokens of each of these rows, decoded together."""
    chosen = [samplings[row] for row in rows]
    context = Context.start(
        [PROMPTS[row] for row in rows], Warp(chosen, 4), [s.seed for s in chosen], rows
    )
    cache, state = TARGET.start(context), drafter.start(context)
    budget = Budget(max(budgets), torch.tensor([budgets[row] for row in rows]))
    while min(n - len(PROMPTS[row]) for n, row in zip(context.lengths, rows, strict=True)) < length:
        parts = context, TARGET, cache, drafter, state
        done = run_round(*parts, verifier, budget)
        commit_round(*parts, done, done.verdict.num_accepted_B.tolist())
    starts = [len(PROMPTS[row]) for row in rows]
    return [context.tokens_BT[b, n : n + length].tolist() for b, n in enumerate(starts)]


SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.7, top_k=3, seed=2),
    Sampling(temperature=0, seed=3),
    Sampling(top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, seed=4),
]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_a_row_alone_emits_what_it_emits_in_a_batch(width, drawn):
    drafter, budgets = ToyDrafter(GUESS, width, drawn), [3, 1, 4, 0]
    together = generate([0, 1, 2, 3], drafter, Rejection(), budgets, SAMPLINGS)
    for row in range(4):
        assert generate([row], drafter, Rejection(), budgets, SAMPLINGS) == [together[row]]
    assert generate([3, 1], drafter, Rejection(), budgets, SAMPLINGS) == [together[3], together[1]]


def test_temperature_zero_ignores_the_draft():
    greedy = [Sampling(temperature=0)] * 4
    plain = generate([0, 1, 2, 3], ToyDrafter(GUESS), Greedy(), [0] * 4, greedy)
    for drafter in (ToyDrafter(GUESS), ToyDrafter(TARGET), ToyDrafter(GUESS, 3, "chosen")):
        for verifier in (Greedy(), Rejection()):
            assert generate([0, 1, 2, 3], drafter, verifier, [3, 1, 4, 0], greedy) == plain


def test_greedy_sees_penalties():
    """The verifier needs only the argmax, but that of the penalised logits."""
    penalised = [Sampling(temperature=0, frequency_penalty=0.5, repetition_penalty=1.5)] * 4
    plain = generate([0, 1, 2, 3], ToyDrafter(GUESS), Rejection(), [0] * 4, penalised)
    assert generate([0, 1, 2, 3], ToyDrafter(GUESS, 2), Greedy(), [3] * 4, penalised) == plain


def test_a_seed_repeats_and_another_does_not():
    drafter = ToyDrafter(GUESS)
    once, again = (generate([0], drafter, Rejection(), [3] * 4, SAMPLINGS, 40) for _ in range(2))
    other = generate([0], drafter, Rejection(), [3] * 4, [Sampling(seed=99)], 40)
    assert once == again
    assert once != other
