"""Relaxed acceptance: against a sort, its distribution, its threshold, its limits, and mutants."""

import math
from dataclasses import dataclass

import pytest
import torch
from random_distributions import (
    drawn_from,
    enumerated_distribution,
    random_pairs,
    sampled_against_closed_form,
    toy_pairs,
)

from outrider.core import Draft, Stream, output_distribution, row_keys
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    enumerate_round,
    greedy_distribution,
    sample_rounds,
)
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.relaxed import Relaxed, RelaxedGreedy

CLASSES = pytest.mark.parametrize("rule_of", [Relaxed, RelaxedGreedy])
RNG = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))
U = torch.tensor(0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "accepts_own_distribution"),
    [
        (Relaxed(2, 0.3), False),
        (Relaxed(10, 1.0), True),
        (Relaxed(1, 0.0), False),
        (RelaxedGreedy(2, 0.3), True),
        (RelaxedGreedy(10, 1.0), True),
    ],
)
def test_contract(rule, accepts_own_distribution):
    check_verifier(rule, trees=False, accepts_own_distribution=accepts_own_distribution)


@CLASSES
@pytest.mark.parametrize("top_k", [0, -1, 2.5, 2.0, True, math.inf])
def test_top_k_is_a_whole_number(rule_of, top_k):
    with pytest.raises(
        InvalidParameterError, match=r"top_k=.*must be a whole number, 1 or greater"
    ):
        rule_of(top_k)


@CLASSES
@pytest.mark.parametrize("delta", [-0.1, 1.1, math.nan, math.inf])
def test_delta_has_a_domain(rule_of, delta):
    with pytest.raises(InvalidParameterError, match=r"delta=.*must be in \[0, 1\]"):
        rule_of(10, delta)


@CLASSES
def test_a_tree_is_an_error(rule_of):
    with pytest.raises(IncompatibleError, match="a single path"):
        enumerate_round(ToyModel.random(3), ToyDrafter(ToyModel.random(3), 2), rule_of(), 2)


def by_sorting(p_V, top_k, delta):
    """Reference implementation by sorting, ties included, shape of p."""
    ranked_V = p_V.sort(descending=True).values
    return (p_V >= ranked_V[:top_k][-1]) & (p_V >= ranked_V[0] - delta) & (p_V > 0)


def disagreement(rule_of, num: int = 10_000) -> int:
    """The number of random cases in which the rule or its ``acceptance`` differs from sorting."""
    generator = torch.Generator().manual_seed(1)
    wrong = 0
    for p_V, q_V in random_pairs(num, seed=2):
        top_k = int(torch.randint(1, 12, (), generator=generator))
        delta = float(torch.rand((), generator=generator) ** 3)
        rule = rule_of(top_k, delta)
        expected_V = by_sorting(p_V, top_k, delta)
        x_V = torch.stack([p_V.argmax(), q_V.argmax(), p_V.argmin()])
        accepted_V = rule.accept(p_V.expand(3, -1), None, x_V, U.expand(3))
        claimed_V = rule.acceptance(p_V, q_V)
        wrong += not bool((accepted_V == expected_V[x_V]).all())
        wrong += not bool((claimed_V == expected_V.double()).all())
    return wrong


@pytest.mark.slow
def test_acceptance_is_the_sorted_rule_for_10000_random_distributions():
    assert disagreement(Relaxed) == 0


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("rule", [Relaxed(2, 0.25), Relaxed(1, 0.0), Relaxed(9, 1.0)])
def test_output_distribution_is_what_is_emitted(rule, drawn):
    for p_V, q_V in toy_pairs().values():
        q_V = drawn_from(q_V, drawn)
        accepted_V = q_V * by_sorting(p_V, rule.top_k, rule.delta)
        pi_V = accepted_V + (1 - accepted_V.sum()) * p_V
        assert (output_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10
        assert (enumerated_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10


def test_the_bound_names_the_threshold():
    for rule in (Relaxed(3, 0.2), RelaxedGreedy(3, 0.2)):
        assert (
            rule.bound.words == "every accepted token has p >= max p - 0.2 and is among the 3 best"
        )
        assert (rule.bound.threshold, rule.bound.divergence) == (0.2, None)


@pytest.mark.parametrize("rule", [Relaxed(1, 1.0), Relaxed(50, 0.0)])
def test_the_strict_ends_accept_all_argmaxes_and_nothing_else(rule):
    for p_V, q_V in random_pairs(500, seed=3):
        assert (rule.acceptance(p_V, q_V).bool() == (p_V == p_V.max())).all()


def test_all_ties_with_the_kth_token_count():
    p_V = torch.tensor([0.4, 0.2, 0.2, 0.2, 0.0])
    accepted = [bool(Relaxed(2, 1.0).accept(p_V, None, torch.tensor(x), U)) for x in range(5)]
    assert accepted == [True, True, True, True, False]


def test_the_lenient_end_accepts_every_possible_token():
    for p_V, q_V in random_pairs(500, seed=4):
        assert (Relaxed(len(p_V), 1.0).acceptance(p_V, q_V).bool() == (p_V > 0)).all()


@pytest.mark.parametrize("rule", [RelaxedGreedy(1, 0.6), RelaxedGreedy(10, 0.0)])
def test_greedy_at_its_strict_ends_is_greedy_token_for_token(rule):
    target, guess = ToyModel.random(4, seed=1), ToyModel.random(4, seed=1, scale=1.0)
    plain, relaxed = (
        sample_rounds(
            target,
            ToyDrafter(guess),
            verification,
            4,
            length=32,
            num_rows=8,
            distribution=greedy_distribution,
        )
        for verification in (Greedy(), rule)
    )
    assert (plain == relaxed).all()


def test_greedy_reads_the_distributions_before_temperature_and_emits_the_argmax():
    """p = (.5, .3, .2): token 1 is 0.2 below the largest, token 2 is 0.3 below it and third."""
    p_BNV = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, 3)
    tokens_BN = torch.tensor([[0, 1, 2, 1]])
    draft = Draft.chain(tokens_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")
    for rule, num_accepted in (
        (RelaxedGreedy(2, 0.25), 1),
        (RelaxedGreedy(3, 0.35), 3),
        (RelaxedGreedy(3, 0.25), 1),
        (RelaxedGreedy(2, 0.35), 1),
        (RelaxedGreedy(3, 0.15), 0),
    ):
        verdict = rule(draft, p_BNV, RNG)
        assert verdict.num_accepted_B.tolist() == [num_accepted]
        assert verdict.next_token_B.tolist() == [0]


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_real_sampler_has_the_distribution(drawn):
    """False alarm with probability 1e-4 per case."""
    assert sampled_against_closed_form(Relaxed(2, 0.5), drawn=drawn) > 1e-4


# ---------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class RankFromOne(Relaxed):
    """Wrong: counts the token itself, so k is one too small."""

    def accept(self, p_V, q_V, x, u):
        p_x1 = p_V.gather(-1, x[..., None])
        return super().accept(p_V, q_V, x, u) & ((p_V >= p_x1).sum(-1) < self.top_k)


@dataclass(frozen=True)
class RatioForDifference(Relaxed):
    """Wrong: interprets δ relative to the largest probability."""

    def accept(self, p_V, q_V, x, u):
        p_x = p_V.gather(-1, x[..., None])[..., 0]
        return Relaxed(self.top_k, 1.0).accept(p_V, q_V, x, u) & (
            p_x >= (1 - self.delta) * p_V.amax(-1)
        )


@dataclass(frozen=True)
class EitherCondition(Relaxed):
    """Wrong: requires one of the two conditions, not both."""

    def accept(self, p_V, q_V, x, u):
        near = Relaxed(10**6, self.delta).accept(p_V, q_V, x, u)
        return near | Relaxed(self.top_k, 1.0).accept(p_V, q_V, x, u)


@pytest.mark.parametrize("mutant", [RankFromOne, RatioForDifference, EitherCondition])
def test_mutants_are_rejected(mutant):
    assert disagreement(mutant, 200) > 10


def test_a_residual_instead_of_the_distribution_is_rejected():
    @dataclass(frozen=True)
    class Residual(Relaxed):
        def reject(self, p_V, q_V, x):
            return (p_V - q_V).clamp(min=0), q_V

    p_V, q_V = toy_pairs()["unlike"]
    emitted_V = enumerated_distribution(Residual(1, 0.0), p_V, q_V)
    assert (emitted_V - output_distribution(Relaxed(1, 0.0), p_V, q_V)).abs().max() > 1e-2
