"""Mentored decoding as a verifier: the emitted distribution, the bound, rejection as its limit,
mutants."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.core import Draft, Drawn, Role, Stream, output_distribution, row_keys, walk_chain
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.recording import capturing
from outrider.runtime.executors.verification_program import GivenNumbers
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    chi2_p_value,
    enumerate_round,
    greedy_distribution,
    sample_rounds,
    target_distribution,
)
from outrider.verifiers import Rejection, mentored
from outrider.verifiers.mentored import Mentored

RULES = [
    Mentored(),
    Mentored(0.02),
    Mentored(0.1, "rkl"),
    Mentored(0.1, "tv"),
    Mentored(0.1, "chi2"),
    Mentored(bracket="blog"),
]
PROMPT = (0, 1)


def distributions_at_prompt(target: ToyModel, guess: ToyModel, drawn: str) -> tuple[Tensor, Tensor]:
    """p and q of the first position, (V,); for a chosen candidate q is a point mass."""
    p_V, q_V = target_distribution(target, PROMPT, 1), target_distribution(guess, PROMPT, 1)
    if drawn == "chosen":
        q_V = torch.zeros_like(q_V).scatter(0, q_V.argmax()[None], 1.0)
    return p_V, q_V


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_contract(rule: Mentored) -> None:
    check_verifier(rule, trees=False)


def test_contract_of_budget_zero_is_lossless_in_distribution() -> None:
    """The attribute ``lossless`` does not depend on the budget and stays False."""
    assert not Mentored(0.0).lossless
    target, drafter = ToyModel.random(3, seed=1), ToyDrafter(ToyModel.random(3, seed=2))
    assert enumerate_round(target, drafter, Mentored(0.0), 3).total_variation < 1e-12


@pytest.mark.parametrize("rule", [*RULES, Mentored(0.5, allow_off_support=True)], ids=repr)
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("impossible", [0, 1])
def test_the_emitted_distribution_is_the_closed_form(
    rule: Mentored, drawn: str, impossible: int
) -> None:
    target = ToyModel.random(4, seed=11, num_impossible=impossible)
    guess = ToyModel.random(4, seed=12)
    found = enumerate_round(
        target, ToyDrafter(guess, drawn=drawn), rule, 1, prompt=PROMPT, length=1
    )
    p_V, q_V = distributions_at_prompt(target, guess, drawn)
    pi_V = output_distribution(rule, p_V, q_V)
    torch.testing.assert_close(found.completed_S, pi_V, rtol=0, atol=1e-10)
    assert float((pi_V - p_V).abs().sum()) > 1e-3  # the budget is used


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("most", [1, 2000, 2**20])
def test_captured_code_decides_the_same(
    most: int, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many positions it solves at a time: one, two or all."""
    monkeypatch.setattr(mentored, "_MOST_AT_ONCE", most)
    p_BNV, q_BNV = torch.randn(2, 100, 6, 9).softmax(-1)
    tokens_BN = q_BNV.flatten(0, 1).multinomial(1).view(100, 6).roll(1, 1)
    mask_BN = torch.arange(6) <= torch.randint(6, (100, 1))
    draft = Draft.chain(tokens_BN, mask_BN, q_BNV if drawn == "iid" else None, drawn)
    rng = Stream(row_keys([0] * 100, list(range(100)), "cpu"), torch.zeros(100).long())
    keys, numbers = [rng.key_B] * 2, [rng.uniform(role, 6) for role in (Role.ACCEPT, Role.NEXT)]
    for rule in RULES:
        expected = rule(draft, p_BNV, GivenNumbers.of(keys, *numbers))
        with capturing():
            found = rule(draft, p_BNV, GivenNumbers.of(keys, *numbers))
        assert torch.equal(found.num_accepted_B, expected.num_accepted_B)
        assert torch.equal(found.next_token_B, expected.next_token_B)
        assert len(expected.num_accepted_B.unique()) > 2


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_kl_of_three_tokens_is_at_most_three_budgets(drawn: str) -> None:
    """The last token of a round adds nothing, so three drafted tokens stay within 3 D."""
    target, guess = ToyModel.random(3, seed=21), ToyModel.random(3, seed=22)
    rule = Mentored(0.05)
    found = enumerate_round(target, ToyDrafter(guess, drawn=drawn), rule, 3, prompt=PROMPT)
    p_S, pi_S = found.target_S, found.completed_S
    spent = float((p_S * (p_S / pi_S).log()).sum())
    limit = rule.bound.per_sequence(3)
    assert limit is not None
    assert 0.2 * limit < spent <= limit


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_real_sampler_has_the_distribution(drawn: str) -> None:
    """The first token of 200,000 outputs against π. False alarm with probability 1e-4; with the
    same number of samples, the test distinguishes π from p."""
    target, guess = ToyModel.random(3, seed=31, order=1), ToyModel.random(3, seed=32, order=1)
    rule, drafter = Mentored(0.1), ToyDrafter(guess, drawn=drawn)
    exact = enumerate_round(target, drafter, rule, 1, prompt=PROMPT, length=1)
    tokens_BK = sample_rounds(
        target, drafter, rule, 1, length=1, num_rows=200_000, prompt=PROMPT, seed=5
    )
    counts_V = tokens_BK[:, 0].bincount(minlength=3)
    p_V, q_V = distributions_at_prompt(target, guess, drawn)
    pi_V = output_distribution(rule, p_V, q_V)
    torch.testing.assert_close(exact.completed_S, pi_V, rtol=0, atol=1e-10)
    assert chi2_p_value(counts_V, pi_V) > 1e-4
    assert chi2_p_value(counts_V, p_V) < 1e-4


def random_chains(B: int, N: int, V: int, seed: int, dtype: torch.dtype) -> tuple[Draft, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z_BNV = 2 * torch.randn(B, N, V, generator=g, dtype=dtype)
    p_BNV = z_BNV.softmax(2)
    q_BNV = (z_BNV + torch.randn(B, N, V, generator=g, dtype=dtype)).softmax(2)
    drawn_BN = torch.multinomial(q_BNV.flatten(0, 1), 1, generator=g).view(B, N)
    tokens_BN = drawn_BN.roll(1, 1)
    mask_BN = torch.arange(N) <= torch.randint(N, (B, 1), generator=g)
    return Draft.chain(tokens_BN, mask_BN, q_BNV, "iid"), p_BNV


@pytest.mark.parametrize("divergence", ["kl", "rkl", "tv", "chi2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_budget_zero_is_rejection_token_for_token(divergence: str, dtype: torch.dtype) -> None:
    rule = Mentored(0.0, divergence)  # type: ignore[arg-type]
    for seed in range(20):
        draft, p_BNV = random_chains(32, 6, 50, seed, dtype)
        rng = Stream(row_keys([seed] * 32, list(range(32)), "cpu"), torch.arange(32))
        ours, plain = rule(draft, p_BNV, rng), Rejection()(draft, p_BNV, rng)
        assert torch.equal(ours.num_accepted_B, plain.num_accepted_B)
        assert torch.equal(ours.next_token_B, plain.next_token_B)
    target, guess = ToyModel.random(4, seed=41), ToyModel.random(4, seed=42)
    for drawn in ("iid", "chosen"):
        ours_BK, plain_BK = (
            sample_rounds(
                target, ToyDrafter(guess, drawn=drawn), which, 3, length=24, num_rows=64, prompt=[0]
            )
            for which in (rule, Rejection())
        )
        assert torch.equal(ours_BK, plain_BK)


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize("budget", [0.02, 0.2, 1.0])
def test_solving_only_reached_positions_equals_the_general_walk(drawn: str, budget: float) -> None:
    """Equal, token for token, to the general walk, which solves every position of the chain."""
    rule = Mentored(budget)
    for seed in range(10):
        draft, p_BNV = random_chains(32, 9, 20, seed, torch.float64)
        if drawn == "chosen":
            draft = Draft.chain(draft.tokens_BN, draft.mask_BN, None, "chosen")
        rng = Stream(row_keys([seed] * 32, list(range(32)), "cpu"), torch.arange(32))
        ours, plain = rule(draft, p_BNV, rng), walk_chain(rule, draft, p_BNV, rng)
        assert torch.equal(ours.num_accepted_B, plain.num_accepted_B)
        assert torch.equal(ours.next_token_B, plain.next_token_B)
        assert bool((ours.num_accepted_B <= draft.num_drafted_B).all())


def test_what_rejection_accepts_is_accepted() -> None:
    draft, p_BNV = random_chains(64, 6, 50, 1, torch.float32)
    assert draft.probs_BNV is not None
    u_BD = torch.rand(64, 5, dtype=torch.float64)
    args = (p_BNV[:, :-1], draft.probs_BNV[:, :-1], draft.tokens_BN[:, 1:], u_BD)
    plain_BD, ours_BD = Rejection().accept(*args), Mentored().accept(*args)
    assert bool((ours_BD | ~plain_BD).all())
    assert int(ours_BD.sum()) > int(plain_BD.sum())


@pytest.mark.parametrize("divergence", ["kl", "rkl", "tv", "chi2"])
def test_at_temperature_0_it_is_rejection(divergence: str) -> None:
    rule = Mentored(0.7, divergence)  # type: ignore[arg-type]
    target, guess = ToyModel.random(3, seed=51), ToyModel.random(3, seed=52)
    for drawn in ("iid", "chosen"):
        for drafter in (ToyDrafter(guess, drawn=drawn), ToyDrafter(target, drawn=drawn)):
            found = enumerate_round(target, drafter, rule, 3, distribution=greedy_distribution)
            assert found.total_variation < 1e-12


def test_tokens_outside_the_support_are_never_emitted_unless_allowed() -> None:
    target = ToyModel.random(4, seed=61, num_impossible=2)
    drafter = ToyDrafter(ToyModel.random(4, seed=62))
    for budget in (0.1, 1.0, 10.0):
        strict = enumerate_round(target, drafter, Mentored(budget), 1, prompt=PROMPT, length=1)
        assert bool((strict.completed_S[strict.target_S == 0] == 0).all())
    rule = Mentored(0.9, allow_off_support=True)
    loose = enumerate_round(target, drafter, rule, 1, prompt=PROMPT, length=1)
    assert float(loose.completed_S[loose.target_S == 0].sum()) > 0.05
    p_S, pi_S = loose.target_S, loose.completed_S
    spent = torch.where(p_S > 0, p_S * (p_S / pi_S).log(), 0.0).sum()
    assert 0.9 * (1 - 1e-6) <= float(spent) <= 0.9


def test_64_tokens_and_vanishing_probabilities() -> None:
    """Ratios down to e^-80 in float32 at 64 positions: finite, and within the bound."""
    torch.manual_seed(0)
    z_BNV = 20 * torch.randn(2, 65, 40)
    p_BNV, q_BNV = z_BNV.softmax(2), z_BNV.roll(1, 2).softmax(2)
    tokens_BN = torch.multinomial(q_BNV.flatten(0, 1), 1).view(2, 65).roll(1, 1)
    draft = Draft.chain(tokens_BN, torch.ones(2, 65).bool(), q_BNV, "iid")
    rng = Stream(row_keys([0, 0], [0, 1], "cpu"), torch.tensor([1, 1]))
    for divergence in ("kl", "rkl", "tv", "chi2"):
        rule = Mentored(0.1, divergence)  # type: ignore[arg-type]
        verdict = rule(draft, p_BNV, rng)
        assert bool((verdict.next_token_B < 40).all())
        pi_BNV = output_distribution(rule, p_BNV.double(), q_BNV.double())
        assert bool(pi_BNV.isfinite().all())
        if divergence == "tv":
            assert float((pi_BNV - p_BNV).abs().sum(2).max() / 2) < 0.1 + 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": -0.1}, "budget=-0.1"),
        ({"budget": float("nan")}, "budget=nan"),
        ({"budget": float("inf")}, "budget=inf"),
        ({"divergence": "js"}, "divergence='js'"),
        ({"bracket": "wide"}, "bracket='wide'"),
        ({"bracket": "blog", "divergence": "tv"}, "bracket='blog'"),
        ({"divergence": "rkl", "allow_off_support": True}, "infinite"),
    ],
)
def test_parameters_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Mentored(**options)  # type: ignore[arg-type]


def test_the_bound_names_the_divergence() -> None:
    assert Mentored(0.2, "chi2").bound.per_token == 0.2
    assert Mentored(0.2, "chi2").bound.divergence == "chi2"
    assert Mentored(0.5, bracket="blog").bound.per_token == pytest.approx(0.6)
    assert "TV(p, π)" in Mentored(divergence="tv").bound.words


def test_a_tree_is_an_error() -> None:
    tokens_BN = torch.zeros(1, 3, dtype=torch.int64)
    parents_BN = torch.tensor([[-1, 0, 0]])
    probs_BNV = torch.full((1, 3, 2), 0.5)
    draft = Draft(tokens_BN, parents_BN, torch.ones(1, 3, dtype=torch.bool), probs_BNV, "iid")
    rng = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))
    with pytest.raises(IncompatibleError, match="a single path"):
        Mentored()(draft, probs_BNV, rng)


@dataclass(frozen=True)
class BetaOmitted(Mentored):
    """Wrong: the residual of rejection, as in ports that omit β."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return Rejection().reject(p_V, q_V, x)


@dataclass(frozen=True)
class FreshAlpha(Mentored):
    """Wrong: α of a budget one per cent larger."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return Mentored(1.01 * self.budget).acceptance(p_V, q_V)


@dataclass(frozen=True)
class SwappedDistributions(Mentored):
    """Wrong: KL(π‖p) where KL(p‖π) is bounded."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return Mentored(self.budget, "rkl").acceptance(p_V, q_V)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return Mentored(self.budget, "rkl").reject(p_V, q_V, x)


@pytest.mark.parametrize("mutant", [BetaOmitted, FreshAlpha, SwappedDistributions])
def test_mutants_exceed_the_budget(mutant: type[Mentored]) -> None:
    g = torch.Generator().manual_seed(71)
    p_RV, q_RV = (1.5 * torch.randn(2, 32, 6, generator=g, dtype=torch.float64)).softmax(2)

    def worst(rule: Mentored) -> float:
        pi_RV = output_distribution(rule, p_RV, q_RV)
        return float((p_RV * (p_RV / pi_RV).log()).sum(1).max())

    assert worst(Mentored(0.05)) <= 0.05
    assert worst(mutant(0.05)) > 0.05 * (1 + 1e-4)
