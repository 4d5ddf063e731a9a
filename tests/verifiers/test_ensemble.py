"""Ensemble: its distribution, its bounds over 10,000 random distributions, parity with
transformers, and mutants."""

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

from outrider.core import Draft, Stream, output_distribution, row_keys
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import ToyDrafter, ToyModel, check_verifier, enumerate_round, sample_rounds
from outrider.verifiers.ensemble import Ensemble, EnsembleGreedy
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection

CLASSES = pytest.mark.parametrize("rule_of", [Ensemble, EnsembleGreedy])
RNG = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))


@CLASSES
@pytest.mark.parametrize("weight", [0.3, 0.9])
def test_contract(rule_of, weight):
    check_verifier(rule_of(weight), trees=False, keeps_support=False)


@CLASSES
@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_weight_has_an_open_domain(rule_of, weight):
    with pytest.raises(InvalidParameterError, match=r"weight=.*must be in \(0, 1\)"):
        rule_of(weight)


@CLASSES
def test_a_tree_is_an_error(rule_of):
    with pytest.raises(IncompatibleError, match="a single path"):
        enumerate_round(ToyModel.random(3), ToyDrafter(ToyModel.random(3), 2), rule_of(), 2)


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
def test_the_mixture_is_emitted(weight, drawn):
    rule = Ensemble(weight)
    for p_V, q_V in toy_pairs().values():
        q_V = drawn_from(q_V, drawn)
        pi_V = weight * p_V + (1 - weight) * q_V
        assert (output_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10
        assert (enumerated_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10


def worst_excess(rule_of, num: int = 10_000) -> float:
    """The largest excess over the bounds, over random distributions and weights.

    KL ignores tokens rarer than the rounding error of a sum of probabilities.
    """
    worst = -math.inf
    generator = torch.Generator().manual_seed(1)
    for p_V, q_V in random_pairs(num, seed=2):
        w = float(torch.rand((), generator=generator).clamp(1e-6, 1 - 1e-6))
        rule = rule_of(w)
        pi_V = output_distribution(rule, p_V, q_V)
        excesses = (
            (w * p_V - pi_V).max(),
            kl(p_V.where(p_V > 1e-15, 0.0), pi_V) - rule.bound.per_token,
            total_variation(p_V, pi_V) - (1 - w) * total_variation(p_V, q_V),
            (pi_V.sum() - 1).abs(),
        )
        worst = max(worst, *map(float, excesses))
    return worst


def test_the_bounds_hold_for_10000_random_distributions():
    assert worst_excess(Ensemble) < 1e-10


def test_the_bound_is_met_with_equality():
    """Disjoint supports: π = w p on all of p's support, and KL(p‖π) = -ln w."""
    p_V, q_V = toy_pairs()["disjoint"]
    rule = Ensemble(0.7)
    assert rule.bound.divergence == "kl"
    assert float(kl(p_V, output_distribution(rule, p_V, q_V))) == pytest.approx(
        rule.bound.per_token
    )


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_towards_one_it_is_rejection_token_for_token(drawn):
    """Except for one draw in 10^9; the seed is fixed."""
    target, guess = ToyModel.random(4, seed=1), ToyModel.random(4, seed=2, num_impossible=1)
    strict, mixed = (
        sample_rounds(
            target, ToyDrafter(guess, drawn=drawn), verification, 4, length=32, num_rows=64
        )
        for verification in (Rejection(), Ensemble(1 - 1e-12))
    )
    assert (strict == mixed).all()


def test_towards_zero_every_draft_is_accepted_even_where_the_target_has_no_mass():
    for p_V, q_V in toy_pairs().values():
        assert (Ensemble(1e-12).acceptance(p_V, q_V)[q_V > 0] > 1 - 1e-10).all()


def test_a_token_outside_both_supports_is_never_accepted():
    probs_V, x, u = torch.tensor([1.0, 0.0]), torch.tensor(1), torch.tensor(0.0).double()
    assert not Ensemble(0.5).accept(probs_V, probs_V, x, u)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_real_sampler_has_the_distribution(drawn):
    """False alarm with probability 1e-4 per case."""
    p_value = sampled_against_closed_form(Ensemble(0.4), drawn=drawn, num_impossible=1)
    assert p_value > 1e-4


# ------------------------------------------------------------------------------ transformers


class Recorded:
    """Replaces ``torch.rand_like`` and ``torch.multinomial`` inside transformers."""

    def __init__(self, u: float) -> None:
        self.u = u
        self.weights_V: torch.Tensor | None = None

    def rand_like(self, like: torch.Tensor) -> torch.Tensor:
        return torch.full_like(like, self.u)

    def multinomial(self, weights_1V: torch.Tensor, num_samples: int) -> torch.Tensor:
        self.weights_V = weights_1V[0]
        return weights_1V.argmax(1, keepdim=True)


def test_acceptance_and_residual_are_those_of_transformers(monkeypatch):
    """Tests u just below and just above our acceptance probability."""
    utils = pytest.importorskip("transformers.generation.utils")
    theirs = getattr(utils, "_speculative_sampling", None)
    if theirs is None:
        pytest.skip("transformers has moved _speculative_sampling")
    num_rejected = 0
    for p_V, q_V in random_pairs(400, seed=4):
        if len(q_V) > 50:
            continue
        rule = Ensemble(0.6)
        x = q_V.argmax()
        probability = float(rule.acceptance(p_V, q_V)[x])
        for u in (probability - 1e-9, probability + 1e-9):
            if not 0 <= u < 1:
                continue
            record = Recorded(u)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "rand_like", record.rand_like)
                patch.setattr(torch, "multinomial", record.multinomial)
                _, num_matches = theirs(
                    x[None, None],
                    q_V.log()[None, None],
                    1,
                    torch.stack([p_V.log(), p_V.log()])[None],
                    assistant_ensemble_weight=0.6,
                )
            ours = bool(rule.accept(p_V, q_V, x, torch.tensor(u, dtype=torch.float64)))
            assert ours == bool(num_matches)
            if not ours:
                left_V, _ = rule.reject(p_V, q_V, x)
                assert (left_V / left_V.sum() - record.weights_V).abs().max() < 1e-9
                num_rejected += 1
    assert num_rejected > 20


def chain_of(q_logits_BNV, x_BD, mask_BN=None) -> Draft:
    tokens_BN = torch.nn.functional.pad(x_BD, (1, 0))
    mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool) if mask_BN is None else mask_BN
    return Draft.chain(tokens_BN, mask_BN, None, "chosen", q_logits_BNV)


def test_greedy_is_the_loop_of_transformers():
    """As there: ``selected = [argmax ν for the candidates, argmax p after]``, first mismatch."""
    generator = torch.Generator().manual_seed(5)
    seen = set()
    for _ in range(200):
        p_BNV, q_BNV = torch.randn(2, 1, 4, 5, generator=generator, dtype=torch.float64)
        q_BNV = p_BNV + 0.7 * q_BNV
        x_BD = q_BNV[:, :-1].argmax(-1)
        nu_BDV = 0.6 * p_BNV[:, :-1].softmax(-1) + (1 - 0.6) * q_BNV[:, :-1].softmax(-1)
        selected_BN = torch.cat([nu_BDV.argmax(-1), p_BNV[:, -1:].argmax(-1)], 1)
        num_matches = int(((~(x_BD == selected_BN[:, :-1])).cumsum(-1) < 1).sum())

        draft = chain_of(q_BNV, x_BD)
        verdict = EnsembleGreedy(0.6)(draft, p_BNV, RNG)
        emitted = verdict.emitted(draft)[0, : int(verdict.num_accepted_B) + 1]
        assert emitted.tolist() == selected_BN[0, : num_matches + 1].tolist()
        seen.add(num_matches)
    assert seen == {0, 1, 2, 3}


def test_after_the_last_drafted_token_of_a_row_the_target_decides():
    """Row 1 drafted nothing, row 0 two tokens; the draft prefers token 1, the target token 0."""
    p_BNV = torch.tensor([0.2, 0.0]).expand(2, 3, 2).clone()
    q_BNV = torch.tensor([0.0, 9.0]).expand(2, 3, 2).clone()
    mask_BN = torch.tensor([[True, True, True], [True, False, False]])
    draft = chain_of(q_BNV, torch.ones(2, 2, dtype=torch.int64), mask_BN)
    verdict = EnsembleGreedy(0.5)(draft, p_BNV, RNG)
    assert verdict.num_accepted_B.tolist() == [2, 0]
    assert verdict.next_token_B.tolist() == [0, 0]


def test_greedy_towards_one_is_greedy():
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        p_BNV, q_BNV = torch.randn(2, 3, 4, 5, generator=generator)
        draft = chain_of(q_BNV, (p_BNV + q_BNV)[:, :-1].argmax(-1))
        ours, plain = (
            rule(draft, p_BNV, RNG).emitted(draft) for rule in (EnsembleGreedy(1 - 1e-9), Greedy())
        )
        assert (ours == plain).all()


def test_greedy_stays_within_its_bound_of_the_largest_probability():
    """p(x) >= max p - (1 - w)/w for every accepted token; some use more than half of it."""
    furthest = 0.0
    for p_V, q_V in random_pairs(4_000, seed=7):
        p_BNV, q_BNV = (probs_V.log().expand(1, 2, -1) for probs_V in (p_V, q_V))
        rule = EnsembleGreedy(0.7)
        verdict = rule(chain_of(q_BNV, q_V.argmax()[None, None]), p_BNV, RNG)
        if int(verdict.num_accepted_B):
            short = float((p_V.max() - p_V[q_V.argmax()]) / rule.bound.threshold)
            assert short <= 1 + 1e-12
            furthest = max(furthest, short)
    assert furthest > 0.5


def test_greedy_needs_the_drafts_logits():
    draft = Draft.chain(
        torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2).bool(), None, "chosen"
    )
    with pytest.raises(AssertionError, match="no logits"):
        EnsembleGreedy()(draft, torch.zeros(1, 2, 3), RNG)


# ---------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class WeightsSwapped(Ensemble):
    """Wrong: w is the weight of the draft."""

    def accept(self, p_V, q_V, x, u):
        return Ensemble(1 - self.weight).accept(p_V, q_V, x, u)


@dataclass(frozen=True)
class ResidualFromTheMixture(Ensemble):
    """Wrong: after a rejection draws from π itself."""

    def reject(self, p_V, q_V, x):
        return self.weight * p_V + (1 - self.weight) * q_V, q_V


@dataclass(frozen=True)
class MixtureAgainstTarget(Ensemble):
    """Wrong: accepts iff u q < w p, without the draft's term."""

    def accept(self, p_V, q_V, x, u):
        return Rejection().accept(self.weight * p_V, q_V, x, u)


@pytest.mark.parametrize(
    "mutant", [WeightsSwapped(0.8), ResidualFromTheMixture(0.8), MixtureAgainstTarget(0.8)]
)
def test_mutants_are_rejected(mutant):
    p_V, q_V = toy_pairs()["unlike"]
    emitted_V = enumerated_distribution(mutant, p_V, q_V)
    assert (emitted_V - (0.8 * p_V + 0.2 * q_V)).abs().max() > 1e-2


def test_the_bounds_reject_a_wrong_residual():
    @dataclass(frozen=True)
    class ResidualOfTheDraft(Ensemble):
        def reject(self, p_V, q_V, x):
            return Rejection().reject(q_V, p_V, x)

    assert worst_excess(ResidualOfTheDraft, 200) > 0.1
