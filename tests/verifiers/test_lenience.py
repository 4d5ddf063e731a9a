"""Lenience: its distribution, its bounds over 10,000 random distributions, its limits, and mutants
of its own."""

import math
from dataclasses import dataclass

import pytest
import torch
from random_distributions import (
    drawn_from,
    enumerated_distribution,
    kl,
    random_pairs,
    sampled_against_closed_form,
    total_variation,
    toy_pairs,
)

from outrider.core import LOSSLESS, output_distribution
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import ToyDrafter, ToyModel, check_verifier, enumerate_round, sample_rounds
from outrider.verifiers.lenience import Lenience
from outrider.verifiers.rejection import Rejection

RESIDUALS = ("target-draft", "scaled")
BOTH = pytest.mark.parametrize("residual", RESIDUALS)


@BOTH
@pytest.mark.parametrize("lenience", [0.3, 1.0])
def test_contract(lenience, residual):
    found = check_verifier(Lenience(lenience, residual), trees=False)
    assert (max(found.values()) < 1e-12) == (lenience == 1)


@pytest.mark.parametrize("lenience", [0.0, -0.1, 1.1, math.nan, math.inf])
def test_lenience_has_a_domain(lenience):
    with pytest.raises(InvalidParameterError, match=r"lenience=.*must be in \(0, 1\]"):
        Lenience(lenience)


def test_residuals_are_named():
    with pytest.raises(InvalidParameterError, match="residual='other': must be"):
        Lenience(residual="other")


def test_a_tree_is_an_error():
    with pytest.raises(IncompatibleError, match="a single path"):
        enumerate_round(ToyModel.random(3), ToyDrafter(ToyModel.random(3), 2), Lenience(), 2)


def by_the_paper(lenience, residual, p_V, q_V):
    """Reference implementation of π: min(q, p/l), plus the rejected mass times the residual."""
    kept_V = torch.minimum(q_V, p_V / lenience)
    left_V = ((p_V if residual == "target-draft" else p_V / lenience) - q_V).clamp(min=0)
    rejected = (q_V - kept_V).sum()
    return kept_V + (rejected * left_V / left_V.sum() if rejected > 0 else 0)


@BOTH
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("lenience", [0.2, 0.8, 1.0])
def test_the_papers_distribution_is_emitted(lenience, drawn, residual):
    rule = Lenience(lenience, residual)
    for p_V, q_V in toy_pairs().values():
        q_V = drawn_from(q_V, drawn)
        pi_V = by_the_paper(lenience, residual, p_V, q_V)
        assert (output_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10
        assert (enumerated_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10


def worst_excess(rule_of, num: int = 10_000) -> float:
    """The largest excess over the bounds, over random distributions and leniences."""
    worst = -math.inf
    generator = torch.Generator().manual_seed(1)
    for p_V, q_V in random_pairs(num, seed=2):
        l = 10 ** float(-4 * torch.rand((), generator=generator) ** 2)  # noqa: E741
        for residual in RESIDUALS:
            rule = rule_of(l, residual)
            pi_V = output_distribution(rule, p_V, q_V)
            excesses = (
                (pi_V * l - p_V).max(),
                kl(pi_V, p_V) + math.log(l),
                total_variation(p_V, pi_V) - (1 - l),
                (pi_V.sum() - 1).abs(),
            )
            worst = max(worst, *map(float, excesses))
    return worst


@pytest.mark.slow
def test_the_bounds_hold_for_10000_random_distributions():
    assert worst_excess(Lenience) < 1e-10


def test_the_bound_is_met_with_equality():
    """q = p/l on half of p's mass, l = 1/2: there π = q, and KL(π‖p) = ln 2."""
    p_V, q_V = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    rule = Lenience(0.5)
    assert rule.bound.divergence == "rkl"
    assert float(kl(output_distribution(rule, p_V, q_V), p_V)) == pytest.approx(
        rule.bound.per_token
    )


def test_the_papers_residual_is_never_further_from_the_target():
    for p_V, q_V in random_pairs(2_000, seed=3):
        close, far = (
            float(total_variation(output_distribution(Lenience(0.6, residual), p_V, q_V), p_V))
            for residual in RESIDUALS
        )
        assert close <= far + 1e-12


@BOTH
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_lenience_one_is_rejection_token_for_token(drawn, residual):
    target, guess = ToyModel.random(4, seed=1), ToyModel.random(4, seed=2, num_impossible=1)
    rule = Lenience(1.0, residual)
    assert rule.lossless
    assert rule.bound == LOSSLESS
    strict, lenient = (
        sample_rounds(
            target, ToyDrafter(guess, drawn=drawn), verification, 4, length=32, num_rows=64
        )
        for verification in (Rejection(), rule)
    )
    assert (strict == lenient).all()


@BOTH
def test_towards_zero_every_possible_token_is_accepted(residual):
    p_V, q_V = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5]])
    rule = Lenience(1e-300, residual)
    assert rule.acceptance(p_V, q_V)[1:].tolist() == [1.0, 0.0]
    pi_V = output_distribution(rule, p_V, q_V)
    assert pi_V.isfinite().all()
    assert pi_V[2] == 0


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_real_sampler_has_the_distribution(drawn, residual):
    """False alarm with probability 1e-4 per case."""
    assert sampled_against_closed_form(Lenience(0.5, residual), drawn=drawn) > 1e-4


# ---------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Inverted(Lenience):
    """Wrong: multiplies p by l instead of q, which accepts less instead of more."""

    def accept(self, p_V, q_V, x, u):
        return Rejection().accept(self.lenience * p_V, q_V, x, u)

    def acceptance(self, p_V, q_V):
        return Rejection().acceptance(self.lenience * p_V, q_V)


@dataclass(frozen=True)
class OneMinus(Lenience):
    """Wrong: interprets the parameter as 1 - l, as other authors do."""

    def accept(self, p_V, q_V, x, u):
        return Lenience(1 - self.lenience).accept(p_V, q_V, x, u)


@dataclass(frozen=True)
class ResidualOfTheDraft(Lenience):
    """Wrong: draws from (q - p)+ after a rejection."""

    def reject(self, p_V, q_V, x):
        return Rejection().reject(q_V, p_V, x)[0], q_V


@pytest.mark.parametrize("mutant", [Inverted(0.8), OneMinus(0.8), ResidualOfTheDraft(0.8)])
def test_mutants_are_rejected(mutant):
    """They do not emit the claimed distribution, that of Lenience(0.8)."""
    p_V, q_V = toy_pairs()["unlike"]
    emitted_V = enumerated_distribution(mutant, p_V, q_V)
    assert (emitted_V - output_distribution(Lenience(0.8), p_V, q_V)).abs().max() > 1e-2


def test_the_bounds_reject_a_wrong_residual():
    assert worst_excess(ResidualOfTheDraft, 200) > 0.1
