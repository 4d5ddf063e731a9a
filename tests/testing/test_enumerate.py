"""ENUM applied to the rules of this package, with every toy drafter."""

import itertools
from dataclasses import replace

import pytest
import torch

from outrider.core import Draft, Prefix, Role
from outrider.sampling import Sampling, Warp
from outrider.testing import (
    SoftmaxDistribution,
    ToyDrafter,
    ToyModel,
    complete,
    enumerate_round,
    greedy_distribution,
    target_distribution,
)
from outrider.testing.enumerate import ScriptedContext
from outrider.verifiers import Greedy, Rejection

TARGET = ToyModel.random(3, seed=1)
GUESS = ToyModel.random(3, seed=2)

DRAFTERS = {
    "iid chain": (ToyDrafter(GUESS), 3),
    "chosen chain": (ToyDrafter(GUESS, 1, "chosen"), 3),
    "confident chain": (ToyDrafter(GUESS, confidence=0.4), 3),
    "iid siblings": (ToyDrafter(GUESS, 3), 3),
    "chosen siblings": (ToyDrafter(GUESS, 2, "chosen"), 2),
    "chosen tree": (ToyDrafter(GUESS, 2, "chosen"), 6),
    "iid tree": (ToyDrafter(GUESS, 2), 3),
    "empty draft": (ToyDrafter(GUESS), 0),
    "own distribution": (ToyDrafter(TARGET), 3),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_rejection_is_lossless(name):
    drafter, num_tokens = DRAFTERS[name]
    result = enumerate_round(TARGET, drafter, Rejection(), num_tokens)
    assert result.total_variation < 1e-12
    assert sum(result.emitted.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_is_lossless(name):
    drafter, num_tokens = DRAFTERS[name]
    result = enumerate_round(
        TARGET, drafter, Greedy(), num_tokens, distribution=greedy_distribution
    )
    assert result.total_variation < 1e-12


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_rejection_at_temperature_zero_is_greedy(drawn):
    drafter = ToyDrafter(GUESS, 1, drawn)
    with_greedy = enumerate_round(TARGET, drafter, Greedy(), 3, distribution=greedy_distribution)
    with_rejection = enumerate_round(
        TARGET, drafter, Rejection(), 3, distribution=greedy_distribution
    )
    assert with_greedy.emitted.keys() == with_rejection.emitted.keys()


@pytest.mark.slow
def test_rejection_is_lossless_on_a_full_binary_tree():
    assert enumerate_round(TARGET, ToyDrafter(GUESS, 2), Rejection(), 6).total_variation < 1e-12


@pytest.mark.slow
def test_rejection_is_lossless_with_four_tokens():
    target, guess = (ToyModel.random(4, order=2, seed=seed) for seed in (3, 4))
    assert enumerate_round(target, ToyDrafter(guess), Rejection(), 3).total_variation < 1e-12


@pytest.mark.parametrize("row_tokens", [0, 1, 2])
def test_rejection_is_lossless_under_ragged_budgets(row_tokens):
    result = enumerate_round(TARGET, ToyDrafter(GUESS), Rejection(), 3, row_tokens=row_tokens)
    assert result.total_variation < 1e-12
    assert max(map(len, result.emitted)) <= row_tokens + 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, top_k=2),
        Sampling(top_p=0.8, min_p=0.05),
        Sampling(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
        Sampling(temperature=0),
    ],
    ids=["top-k", "top-p", "penalties", "greedy"],
)
@pytest.mark.parametrize("width", [1, 2])
def test_rejection_is_lossless_under_a_real_warp(sampling, width):
    result = enumerate_round(
        TARGET,
        ToyDrafter(GUESS, width),
        Rejection(),
        3,
        distribution=lambda B: Warp([sampling] * B, 3),
    )
    assert result.total_variation < 1e-12


def test_acceptance_length_is_the_closed_form():
    """Context-free distributions: (1 - α^{γ+1}) / (1 - α) with α = Σ min(p, q)."""
    target, guess = (ToyModel.random(4, order=0, seed=seed) for seed in (5, 6))
    p_V, q_V = target.table_EV[0].softmax(0), guess.table_EV[0].softmax(0)
    alpha = float(torch.minimum(p_V, q_V).sum())
    result = enumerate_round(target, ToyDrafter(guess), Rejection(), 3)
    assert result.acceptance_length == pytest.approx((1 - alpha**4) / (1 - alpha), abs=1e-12)


def test_a_draft_from_the_own_distribution_is_accepted_whole():
    result = enumerate_round(TARGET, ToyDrafter(TARGET), Rejection(), 3)
    assert result.acceptance_length == pytest.approx(4, abs=1e-12)


def test_disjoint_supports_accept_nothing():
    target = ToyModel(torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]]).double(), 0)
    guess = ToyModel(torch.tensor([[-torch.inf, -torch.inf, 0.0, 1.0]]).double(), 0)
    result = enumerate_round(target, ToyDrafter(guess), Rejection(), 2)
    assert result.acceptance_length == 1
    assert result.total_variation < 1e-12


def test_target_distribution_is_the_chain_rule():
    prompt, distribution = (0, 1), target_distribution(TARGET, (0, 1), 3)
    for index, tokens in enumerate(itertools.product(range(3), repeat=3)):
        expected = 1.0
        for n, token in enumerate(tokens):
            context = ScriptedContext.repeat(
                (*prompt, *tokens[:n]), 1, lambda B: SoftmaxDistribution()
            )
            draft = Draft.root_only(context.root_B)
            logits_BNV = TARGET.score(TARGET.start(context), draft).logits_BNV
            p_BNV = context.distribution(logits_BNV, Prefix.of_draft(context, draft))
            expected *= float(p_BNV[0, 0, token])
        assert float(distribution[index]) == pytest.approx(expected, abs=1e-15)


def test_completion_of_a_wrong_distribution_shows_its_distance():
    target = ToyModel(torch.zeros(1, 2).double(), 0)
    assert complete(target, {(0,): 0.75, (1,): 0.25}, (0,), 3).total_variation == 0.25


class Noisy(Rejection):
    """Requests noise keyed by the tokens' own positions, as a coupled rule does."""

    def __call__(self, draft, p_BNV, rng):
        rng.at(rng.position_B + 1).uniform(Role.NOISE, 1)
        return super().__call__(draft, p_BNV, rng)


class Moody(Rejection):
    """Requests more numbers when the draft is short."""

    def __call__(self, draft, p_BNV, rng):
        rng.uniform(Role.NOISE, 1 + draft.tokens_BN.shape[0] % 2)
        return super().__call__(draft, p_BNV, rng)


@pytest.mark.parametrize(
    ("verifier", "error", "message"),
    [
        (Noisy(), NotImplementedError, "use chi2"),
        (Moody(), AssertionError, "not requested when recording"),
    ],
)
def test_numbers_that_cannot_be_scripted_are_an_error(verifier, error, message):
    with pytest.raises(error, match=message):
        enumerate_round(TARGET, ToyDrafter(GUESS, 2), verifier, 3)


def test_the_order_of_siblings_does_not_matter():
    """i.i.d. draws are exchangeable: reversing them leaves the emitted distribution as it is."""

    class Reversed(ToyDrafter):
        def propose(self, state, context, budget, rng):
            draft = super().propose(state, context, budget, rng)
            tokens_BN = torch.cat([draft.tokens_BN[:, :1], draft.tokens_BN[:, 1:].flip(1)], 1)
            return replace(draft, tokens_BN=tokens_BN)

    forwards = enumerate_round(TARGET, ToyDrafter(GUESS, 3), Rejection(), 3).emitted
    backwards = enumerate_round(TARGET, Reversed(GUESS, 3), Rejection(), 3).emitted
    for tokens in forwards.keys() | backwards.keys():
        assert forwards.get(tokens, 0) == pytest.approx(backwards.get(tokens, 0), abs=1e-12)
