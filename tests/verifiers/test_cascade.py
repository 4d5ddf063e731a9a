"""Speculative cascades: the distribution of each rule, the ends of α, temperature 0, and
mutants."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from random_distributions import (
    enumerated_distribution,
    random_pairs,
    sampled_against_closed_form,
    toy_pairs,
)

from outrider.core import Draft, Stream, check_compatible, output_distribution, row_keys
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    enumerate_round,
    sample_rounds,
)
from outrider.verifiers.cascade import Cascade, CascadeGreedy
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.rejection import Rejection

DOMAINS = {
    "chow": (0.0, 1.0),
    "diff": (-1.0, 1.0),
    "opt": (-1e6, 1e6),
    "token_v1": (-1.0, 1.0),
    "token_v2": (-1.0, 1.0),
    "token_v3": (0.0, 1.0),
}
MIDDLE = {
    "chow": 0.5,
    "diff": 0.1,
    "opt": -0.3,
    "token_v1": 0.1,
    "token_v2": 0.25,
    "token_v3": 0.5,
}
DEFERRALS = pytest.mark.parametrize("deferral", list(DOMAINS))
CLASSES = pytest.mark.parametrize("rule_of", [Cascade, CascadeGreedy])
RNG = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))


@DEFERRALS
def test_contract(deferral):
    """The token rules do not keep every token even if the draft is the target."""
    rule = Cascade(deferral, MIDDLE[deferral])
    whole = deferral in ("chow", "diff", "opt")
    keeps_support = deferral == "token_v3"
    check_verifier(rule, trees=False, accepts_own_distribution=whole, keeps_support=keeps_support)


@DEFERRALS
def test_greedy_contract(deferral):
    rule = CascadeGreedy(deferral, MIDDLE[deferral])
    check_verifier(rule, trees=False, keeps_support=deferral == "token_v3")


@CLASSES
@DEFERRALS
def test_alpha_has_a_domain(deferral, rule_of):
    low, high = DOMAINS[deferral]
    rule_of(deferral, low)
    rule_of(deferral, high)
    outside = [math.nan, math.inf, -math.inf]
    if deferral != "opt":
        outside += [low - 0.01, high + 0.01]
    for alpha in outside:
        with pytest.raises(InvalidParameterError, match=f"alpha=.*: must be .* for {deferral}"):
            rule_of(deferral, alpha)


@CLASSES
def test_deferrals_are_named(rule_of):
    with pytest.raises(InvalidParameterError, match="deferral='other': must be one of chow, diff"):
        rule_of("other")


@CLASSES
def test_a_tree_is_an_error(rule_of):
    with pytest.raises(IncompatibleError, match="a single path"):
        enumerate_round(ToyModel.random(3), ToyDrafter(ToyModel.random(3), 2), rule_of(), 2)


def test_a_chosen_draft_is_an_error():
    with pytest.raises(IncompatibleError, match="cannot verify 'chosen'"):
        check_compatible(ToyDrafter(ToyModel.random(3), drawn="chosen"), Cascade())


def by_the_paper(deferral, alpha, p_V, q_V):
    """Reference implementation in numpy: which tokens are kept, and π."""
    p, q = p_V.numpy(), q_V.numpy()
    distance = np.maximum(q - p, 0).sum()
    kept = {
        "chow": q.max() >= 1 - alpha,
        "diff": q.max() >= p.max() - alpha,
        "opt": q.max() >= p.max() - alpha * distance,
        "token_v1": q >= p.max() - alpha,
        "token_v2": p >= p.max() - alpha,
        "token_v3": p >= (1 - alpha) * p.max(),
    }[deferral] & np.ones_like(p, dtype=bool)
    pi = np.where(kept, q, 0) + (1 - q[kept].sum()) * p
    return torch.from_numpy(kept), torch.from_numpy(pi)


def random_alpha(deferral, generator) -> float:
    low, high = DOMAINS[deferral] if deferral != "opt" else (-3.0, 3.0)
    return low + (high - low) * float(torch.rand((), generator=generator))


def worst_error(rule_of, num: int) -> float:
    """The largest deviation of the claimed distribution from the paper's, and of its sum from one,
    over random distributions."""
    worst = 0.0
    generator = torch.Generator().manual_seed(1)
    for p_V, q_V in random_pairs(num, seed=2):
        deferral = list(DOMAINS)[int(torch.randint(6, (), generator=generator))]
        alpha = random_alpha(deferral, generator)
        rule = rule_of(deferral, alpha)
        _, pi_V = by_the_paper(deferral, alpha, p_V, q_V)
        claimed_V = output_distribution(rule, p_V, q_V)
        worst = max(worst, float((claimed_V - pi_V).abs().max()), abs(float(claimed_V.sum()) - 1))
    return worst


@pytest.mark.slow
def test_the_distribution_is_the_papers_for_10000_random_distributions():
    assert worst_error(Cascade, 10_000) < 1e-10


@DEFERRALS
def test_acceptance_is_decided_where_its_probability_says(deferral):
    """Compares the short form of ``accept`` with min(1, π/q), at u just below and just above it."""
    generator = torch.Generator().manual_seed(3)
    decided = 0
    for p_V, q_V in random_pairs(800, seed=3):
        rule = Cascade(deferral, random_alpha(deferral, generator))
        x = torch.multinomial(q_V, 1, generator=generator)[0]
        probability = float(rule.acceptance(p_V, q_V)[x])
        for u, accepted in ((probability - 1e-9, True), (probability + 1e-9, False)):
            if 0 <= u < 1:
                u = torch.tensor(u, dtype=torch.float64)
                assert bool(rule.accept(p_V, q_V, x, u)) == accepted
                decided += 1
    assert decided > 500


@DEFERRALS
def test_the_cascades_distribution_is_emitted(deferral):
    low, high = DOMAINS[deferral]
    for alpha in (low, MIDDLE[deferral], high):
        rule = Cascade(deferral, alpha)
        for p_V, q_V in toy_pairs().values():
            _, pi_V = by_the_paper(deferral, alpha, p_V, q_V)
            assert (output_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10
            assert (enumerated_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10


def emitted_tokens(verification, *, num_impossible=0):
    target, guess = (
        ToyModel.random(4, seed=seed, num_impossible=num_impossible) for seed in (1, 2)
    )
    return sample_rounds(target, ToyDrafter(guess), verification, 4, length=32, num_rows=64)


@pytest.mark.parametrize(
    ("deferral", "alpha"),
    [("chow", 0.0), ("diff", -1.0), ("token_v1", -1.0), ("token_v2", -1.0), ("opt", -1e6)],
)
def test_the_lower_end_is_rejection_token_for_token(deferral, alpha):
    rule = Cascade(deferral, alpha)
    for num_impossible in (0, 1):
        strict = emitted_tokens(Rejection(), num_impossible=num_impossible)
        assert (emitted_tokens(rule, num_impossible=num_impossible) == strict).all()


def test_the_lower_end_holds_for_all_distributions_but_those_that_the_docstring_names():
    """chow at 0 keeps point masses of the draft; opt needs α TV <= -1; the others know none."""
    exceptions = 0
    for p_V, q_V in random_pairs(2_000, seed=4):
        for deferral in ("diff", "token_v1", "token_v2"):
            assert (Cascade(deferral, -1.0).distribution(p_V, q_V) == p_V).all()
        chow_V = Cascade("chow", 0.0).distribution(p_V, q_V)
        exceptions += bool((q_V == 1).any())
        assert (chow_V == (q_V if (q_V == 1).any() else p_V)).all()
        distance = float((p_V - q_V).clamp(min=0).sum())
        if distance > 1e-9:
            assert (Cascade("opt", -1.001 / distance).distribution(p_V, q_V) == p_V).all()
    assert exceptions > 100


def test_v3_at_zero_is_not_plain_speculative_decoding():
    """It keeps the target's most probable token; so does v2. p = (.1, .2, .7), q = (.6, .3, .1)."""
    p_V, q_V = toy_pairs()["unlike"]
    expected_V = 0.9 * p_V + torch.tensor([0.0, 0.0, 0.1], dtype=torch.float64)
    for deferral in ("token_v2", "token_v3"):
        assert (Cascade(deferral, 0.0).distribution(p_V, q_V) - expected_V).abs().max() < 1e-15


@pytest.mark.parametrize(
    ("deferral", "alpha"), [(name, high) for name, (_, high) in DOMAINS.items()]
)
def test_the_upper_end_accepts_everything(deferral, alpha):
    rule = Cascade(deferral, alpha)
    almost_one = torch.tensor(1 - 2.0**-52, dtype=torch.float64)
    for p_V, q_V in random_pairs(1_000, seed=5):
        if deferral == "opt" and float((p_V - q_V).abs().sum()) < 1e-5:
            continue  # α TV has to reach 1
        assert (rule.distribution(p_V, q_V) - q_V).abs().max() < 1e-12
        for distribution in (torch.float64, torch.float32):
            x = q_V.argmax()
            assert rule.accept(p_V.to(distribution), q_V.to(distribution), x, almost_one)


def test_rounding_makes_no_negative_distribution():
    """In float32 the kept mass of q can round to more than 1."""
    rounded = 0
    for p_V, q_V in random_pairs(1_000, seed=9):
        p_V, q_V = p_V.float(), q_V.float()
        rounded += bool(q_V.sum() > 1)
        rule = Cascade("token_v2", 0.999)
        assert (rule.distribution(p_V, q_V) >= 0).all()
        assert (Cascade("token_v2", 1.0).acceptance(p_V, q_V) == 1).all()
    assert rounded > 10


def test_v3_never_leaves_the_targets_support():
    for p_V, q_V in random_pairs(1_000, seed=6):
        pi_V = Cascade("token_v3", 0.99).distribution(p_V, q_V)
        assert (pi_V[p_V == 0] == 0).all()


@DEFERRALS
def test_the_bound_is_in_words(deferral):
    bound = Cascade(deferral, 0.25).bound
    assert "0.25" in bound.words
    assert (bound.threshold, bound.divergence, bound.per_token) == (0.25, None, None)
    assert CascadeGreedy(deferral, 0.25).bound == bound


@pytest.mark.slow
@DEFERRALS
def test_the_real_sampler_has_the_distribution(deferral):
    """False alarm with probability 1e-4 per case."""
    rule = Cascade(deferral, MIDDLE[deferral])
    assert sampled_against_closed_form(rule, num_impossible=1) > 1e-4


# ---------------------------------------------------------------------------- temperature 0


def chain_of(q_BNV, x_BD) -> Draft:
    tokens_BN = torch.nn.functional.pad(x_BD, (1, 0))
    return Draft.chain(tokens_BN, torch.ones_like(tokens_BN).bool(), None, "chosen", q_BNV)


@DEFERRALS
def test_greedy_keeps_what_the_rule_keeps_before_temperature(deferral):
    generator = torch.Generator().manual_seed(7)
    seen = set()
    for p_V, q_V in random_pairs(1_200, seed=7):
        alpha = random_alpha(deferral, generator)
        kept_V, _ = by_the_paper(deferral, alpha, p_V, q_V)
        x, best = int(q_V.argmax()), int(p_V.argmax())
        draft = chain_of(q_V.log().expand(1, 2, -1), torch.tensor([[x]]))
        verdict = CascadeGreedy(deferral, alpha)(draft, p_V.log().expand(1, 2, -1), RNG)
        accepted = bool(verdict.num_accepted_B)
        assert accepted == (x == best or bool(kept_V[x]))
        assert int(verdict.next_token_B) == best
        seen.add((accepted, x == best))
    assert seen >= {(True, True), (True, False), (False, False)}


@pytest.mark.parametrize(
    ("deferral", "alpha"), [("chow", 0.0), ("diff", -1.0), ("token_v1", -1.0), ("token_v3", 0.0)]
)
def test_greedy_at_its_lower_end_is_greedy(deferral, alpha):
    generator = torch.Generator().manual_seed(8)
    rule = CascadeGreedy(deferral, alpha)
    for _ in range(50):
        p_BNV, q_BNV = torch.randn(2, 3, 4, 5, generator=generator)
        draft = chain_of(q_BNV, (p_BNV + q_BNV)[:, :-1].argmax(-1))
        ours, plain = (
            verification(draft, p_BNV, RNG).emitted(draft) for verification in (rule, Greedy())
        )
        assert (ours == plain).all()


def test_greedy_needs_the_drafts_logits():
    draft = chain_of(None, torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(AssertionError, match="no logits"):
        CascadeGreedy()(draft, torch.zeros(1, 2, 3), RNG)


def test_without_a_draft_greedy_is_plain():
    draft = Draft.root_only(torch.zeros(1, dtype=torch.int64))
    assert CascadeGreedy()(draft, torch.tensor([[[0.0, 2.0, 1.0]]]), RNG).next_token_B.tolist() == [
        1
    ]


# ---------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class DeferredMassKept(Cascade):
    """Wrong: the notebook's comment, 1 - the *rejected* mass, where its code has the kept one."""

    def distribution(self, p_V, q_V):
        kept_V = self.kept(p_V, q_V)
        return torch.where(kept_V, q_V, 0.0) + torch.where(kept_V, q_V, 0.0).sum() * p_V


@dataclass(frozen=True)
class ModelsSwapped(Cascade):
    """Wrong: the deferral rule with p and q exchanged."""

    def kept(self, p_V, q_V):
        return super().kept(q_V, p_V)


@dataclass(frozen=True)
class DefersWhatItShouldKeep(Cascade):
    """Wrong: the paper's r = 1, which means deferral, taken for keeping."""

    def kept(self, p_V, q_V):
        return ~super().kept(p_V, q_V)


@dataclass(frozen=True)
class ResidualTowardTheTarget(Cascade):
    """Wrong: accepts towards π, but draws from (p - q)+ after a rejection."""

    def reject(self, p_V, q_V, x):
        return Rejection().reject(p_V, q_V, x)


@pytest.mark.parametrize(
    "mutant", [DeferredMassKept, ModelsSwapped, DefersWhatItShouldKeep, ResidualTowardTheTarget]
)
def test_mutants_are_rejected(mutant):
    assert worst_error(mutant, 300) > 0.1


@pytest.mark.parametrize(
    "mutant", [DeferredMassKept("token_v2", 0.25), ResidualTowardTheTarget("token_v2", 0.25)]
)
def test_what_mutants_emit_is_not_the_cascades_distribution(mutant):
    p_V, q_V = toy_pairs()["alike"]
    _, pi_V = by_the_paper("token_v2", 0.25, p_V, q_V)
    assert (enumerated_distribution(Cascade("token_v2", 0.25), p_V, q_V) - pi_V).abs().max() < 1e-10
    assert (enumerated_distribution(mutant, p_V, q_V) - pi_V).abs().max() > 1e-3
