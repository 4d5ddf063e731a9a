"""Rules against the best one, place by place: right rules stay below it, wrong ones are found."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from random_distributions import random_pairs
from torch import Tensor

from outrider.core import Divergence, output_distribution
from outrider.core.divergences import divergences
from outrider.lab.analysis.frontier import DIVERGENCES, Envelope, Places, verification
from outrider.verifiers import Rejection
from outrider.verifiers.clamp import sorted_path


def one_pair(seed: int = 0, K: int = 6, V: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits_2KV = torch.randn(2, K, V, generator=generator, dtype=torch.float64)
    p_KV, q_KV = logits_2KV.softmax(-1)
    return p_KV, q_KV


@dataclass(frozen=True)
class Oracle:
    """The best rule, from the solver; ``lost`` of its budget is thrown away."""

    p_KV: Tensor
    q_KV: Tensor
    lost: float = 0.0

    def __call__(self, divergence: Divergence, budget_K: Tensor, off_support: bool) -> Tensor:
        path = sorted_path(divergence, self.p_KV, self.q_KV, off_support)
        rows = [path.exact(float(b * (1 - self.lost)))[k, 0] for k, b in enumerate(budget_K)]
        return 1 - torch.stack(rows)


@dataclass(frozen=True)
class Mixture(Rejection):
    """Rejection sampling toward w p + (1 - w) q."""

    weight: float = 0.7

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return super().acceptance(self.weight * p_V + (1 - self.weight) * q_V, q_V)


@dataclass(frozen=True)
class Boastful(Mixture):
    """Wrong: claims to accept a little more than it does."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return super().acceptance(p_V, q_V) * 1.2

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return p_V, q_V


@dataclass(frozen=True)
class Clamped:
    """Mentored decoding for KL, stated by hand: the clamp at a given β, α found by bisection."""

    beta: float

    def distribution(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        low, high = torch.zeros(len(p_V), 1).double(), torch.ones(len(p_V), 1).double()
        b_V = p_V / self.beta
        for _ in range(80):  # the larger α, the smaller the mass
            alpha = (low + high) / 2
            pi_V = q_V.maximum(b_V).minimum(p_V / alpha)
            low = torch.where(pi_V.sum(-1, keepdim=True) > 1, alpha, low)
            high = torch.where(pi_V.sum(-1, keepdim=True) > 1, high, alpha)
        return q_V.maximum(b_V).minimum(p_V / high)

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return (self.distribution(p_V, q_V) / q_V).clamp(max=1)

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        raise NotImplementedError

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        assert q_V is not None
        return (self.distribution(p_V, q_V) - q_V).clamp(min=0), q_V


def held(rule: object, lost: float = 0.0, seed: int = 0) -> Envelope:
    p_KV, q_KV = one_pair(seed)
    envelope = Envelope()
    envelope.hold("it", verification(rule, p_KV, q_KV), Oracle(p_KV, q_KV, lost))  # type: ignore[arg-type]
    return envelope


def test_what_a_rule_does_by_hand() -> None:
    p_KV = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]], dtype=torch.float64)
    q_KV = torch.tensor([[0.2, 0.3, 0.5], [0.3, 0.2, 0.5]], dtype=torch.float64)
    exact = verification(Rejection(), p_KV, q_KV)
    assert exact.acceptance_K.tolist() == pytest.approx([0.7, 0.5], abs=1e-15)
    assert exact.divergences.tv.tolist() == pytest.approx([0, 0], abs=1e-15)
    mixed = verification(Mixture(weight=0.5), p_KV, q_KV)
    assert mixed.acceptance_K.tolist() == pytest.approx([0.85, 0.75], abs=1e-15)
    assert mixed.divergences.tv.tolist() == pytest.approx([0.15, 0.25], abs=1e-15)
    assert mixed.off_support_K.tolist() == [False, True]
    means = Places.cat([exact, mixed]).means()
    assert means["acceptance"] == pytest.approx((0.7 + 0.5 + 0.85 + 0.75) / 4, abs=1e-15)
    assert means["tv"] == pytest.approx(0.1, abs=1e-15)
    assert means["rkl"] == math.inf


def test_the_rule_may_be_asked_for_its_acceptance_once() -> None:
    p_KV, q_KV = one_pair(4)
    expected = divergences(p_KV, output_distribution(Mixture(), p_KV, q_KV))
    assert torch.equal(verification(Mixture(), p_KV, q_KV).divergences.kl, expected.kl)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", [Rejection(), Mixture(), Mixture(weight=0.2), Clamped(1.3)])
def test_right_rules_stay_below(rule: object, seed: int) -> None:
    envelope = held(rule, seed=seed)
    assert envelope.holds, envelope.as_dict()
    assert envelope.comparisons == dict.fromkeys(DIVERGENCES, 6)


def test_the_optimal_distribution_stated_by_hand_lies_on_the_envelope() -> None:
    """So a solver that is any worse is found out by it; see the next test."""
    envelope = held(Clamped(1.3))
    assert all(-1e-5 < excess <= 1e-9 for excess in envelope.excess.values()), envelope.as_dict()


@pytest.mark.parametrize("lost", [1e-4, 0.1])
def test_a_solver_that_wastes_its_budget_is_found(lost: float) -> None:
    envelope = held(Clamped(1.3), lost)
    assert not envelope.holds
    assert min(envelope.excess.values()) > 1e-9
    assert set(envelope.by.values()) == {"it"}


def test_a_rule_that_claims_too_much_is_found() -> None:
    assert held(Mixture(weight=0.9)).holds
    assert not held(Boastful(weight=0.9)).holds


def test_a_best_rule_that_does_not_reach_its_envelope_is_found() -> None:
    p_KV, q_KV = one_pair()
    for rule, reaches in ((Clamped(1.3), True), (Mixture(), False)):
        envelope = Envelope()
        places = verification(rule, p_KV, q_KV)  # type: ignore[arg-type]
        envelope.hold("it", places, Oracle(p_KV, q_KV), optimal_for="kl")
        assert envelope.holds == reaches
        assert max(envelope.excess.values()) <= 1e-9


def test_nan_never_holds() -> None:
    p_KV, q_KV = one_pair()
    places = verification(Mixture(), p_KV, q_KV)
    nan_K = places.acceptance_K * math.nan
    for broken in (
        replace(places, acceptance_K=nan_K),
        replace(places, divergences=replace(places.divergences, kl=nan_K)),
    ):
        envelope = Envelope()
        envelope.hold("broken", broken, Oracle(p_KV, q_KV))
        envelope.hold("fine", places, Oracle(p_KV, q_KV))
        assert not envelope.holds
        assert "broken" in envelope.by.values()


def test_distributions_of_every_shape() -> None:
    """Zeros, ties, point masses, disjoint supports, equal distributions, underflow."""
    envelope = Envelope()
    for p_V, q_V in random_pairs(64, seed=3):
        for rule in (Mixture(), Mixture(weight=0.01)):
            envelope.hold(
                f"{rule}", verification(rule, p_V[None], q_V[None]), Oracle(p_V[None], q_V[None])
            )
    assert envelope.holds, envelope.as_dict()
    assert envelope.comparisons["tv"] == 128
    assert 64 < envelope.comparisons["rkl"] < 128  # infinite ones say nothing
