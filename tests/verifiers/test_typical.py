"""Typical acceptance: against scipy's entropy, its distribution, its threshold, its limits, and
mutants."""

import math
from dataclasses import dataclass

import pytest
import scipy.special
import torch
from random_distributions import (
    drawn_from,
    enumerated_distribution,
    random_pairs,
    sampled_against_closed_form,
    toy_pairs,
)

from outrider.core import Draft, Stream, output_distribution, row_keys
from outrider.core.errors import InvalidParameterError
from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    enumerate_round,
    greedy_distribution,
    sample_rounds,
)
from outrider.verifiers.greedy import Greedy
from outrider.verifiers.typical import Typical

U = torch.tensor(0.5, dtype=torch.float64)
EMITS = pytest.mark.parametrize("emit", ["sample", "argmax"])


@EMITS
@pytest.mark.parametrize(
    ("epsilon", "delta", "accepts_own_distribution"),
    [(0.4, 0.9, False), (0.0, 0.3, True), (1, 0.5, False)],
)
def test_contract(epsilon, delta, accepts_own_distribution, emit):
    rule = Typical(epsilon, delta, emit)
    check_verifier(rule, accepts_own_distribution=accepts_own_distribution)


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, math.nan, math.inf])
def test_epsilon_has_a_domain(epsilon):
    with pytest.raises(InvalidParameterError, match=r"epsilon=.*must be in \[0, 1\]"):
        Typical(epsilon)


@pytest.mark.parametrize("delta", [-0.1, -math.inf, math.nan])
def test_delta_has_a_domain(delta):
    with pytest.raises(InvalidParameterError, match=r"delta=.*must be 0 or greater"):
        Typical(0.1, delta)


def test_emit_is_one_of_two():
    with pytest.raises(InvalidParameterError, match="emit='best': must be"):
        Typical(emit="best")


def longest_typical_path(rule, draft, p_NV, row):
    """The accepted path by a search over all nodes: the longest, then the one of largest product
    of p."""
    best = (0, 0.0, [])
    for node in range(1, draft.num_nodes):
        path, i = [], node
        while i > 0:
            path, i = [i, *path], int(draft.parents_BN[row, i])
        product = 1.0
        for above, i in zip([0, *path], path, strict=False):
            p_V, x = p_NV[above], draft.tokens_BN[row, i]
            entropy = float(scipy.special.entr(p_V.numpy()).sum())
            typical = p_V[x] > min(rule.epsilon, rule.delta * math.exp(-entropy))
            product *= float(p_V[x]) if typical and bool(draft.mask_BN[row, i]) else 0.0
        if product > 0:
            best = max(best, (len(path), product, [-i for i in path]))  # of equals, the first
    return [-i for i in best[2]]


@EMITS
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_longest_typical_path_of_a_tree_is_kept(emit, drawn):
    """Against a search, for random distributions at the nodes; some nodes do not exist."""
    B, N, V = 200, 8, 5
    generator = torch.Generator().manual_seed(3)
    p_BNV = (1.5 * torch.randn(B, N, V, generator=generator).double()).softmax(-1)
    tokens_BN = torch.randint(V, (B, N), generator=generator)
    parents_BN = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 5]).expand(B, N)
    mask_BN = torch.rand(B, N, generator=generator) > 0.1
    mask_BN[:, 0] = True
    for i in range(1, N):
        mask_BN[:, i] &= mask_BN.gather(1, parents_BN[:, i : i + 1])[:, 0]
    probs_BNV = None if drawn == "chosen" else p_BNV
    draft = Draft(tokens_BN, parents_BN, mask_BN, probs_BNV, drawn)
    rule = Typical(0.2, 0.8, emit)
    rng = Stream(row_keys([0] * B, list(range(B)), "cpu"), torch.zeros(B, dtype=torch.int64))
    verdict = rule(draft, p_BNV, rng)
    lengths = set()
    for row in range(B):
        wanted = longest_typical_path(rule, draft, p_BNV[row], row)
        num = int(verdict.num_accepted_B[row])
        assert verdict.path_BD[row, :num].tolist() == wanted
        if emit == "argmax":
            last = wanted[-1] if wanted else 0
            assert int(verdict.next_token_B[row]) == int(p_BNV[row, last].argmax())
        lengths.add(num)
    assert lengths == {0, 1, 2, 3}


def test_the_next_token_of_a_tree_is_drawn_from_the_target():
    """ENUM: where nothing is typical, a round emits one token of the target's distribution."""
    target, drafter = ToyModel.random(3), ToyDrafter(ToyModel.random(3, seed=1), 2)
    done = enumerate_round(target, drafter, Typical(1.0, math.inf), 2, length=1)
    assert done.total_variation < 1e-12


def disagreement(rule_of, num: int = 10_000) -> int:
    """The number of random cases in which the rule or its ``acceptance`` differs from the paper."""
    generator = torch.Generator().manual_seed(1)
    wrong = 0
    for p_V, q_V in random_pairs(num, seed=2):
        epsilon, delta = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        epsilon, delta = epsilon**2, 1.5 * delta
        rule = rule_of(epsilon, delta)
        entropy = float(scipy.special.entr(p_V.numpy()).sum())
        threshold = min(epsilon, delta * math.exp(-entropy))
        at_V = torch.stack([p_V.argmax(), q_V.argmax(), p_V.argmin()])
        clear_V = (p_V - threshold).abs() > 1e-12  # unless rounding decides
        accepted_V = rule.accept(p_V.expand(3, -1), None, at_V, U.expand(3))
        claimed_V = rule.acceptance(p_V, q_V)
        wrong += bool(((accepted_V != (p_V > threshold)[at_V]) & clear_V[at_V]).any())
        wrong += bool(((claimed_V != (p_V > threshold).double()) & clear_V).any())
    return wrong


@pytest.mark.slow
def test_acceptance_is_the_papers_for_10000_random_distributions():
    assert disagreement(Typical) == 0


@EMITS
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.25, 0.9), (0.6, math.inf), (0.0, 0.3), (1, 1)])
def test_output_distribution_is_what_is_emitted(epsilon, delta, drawn, emit):
    rule = Typical(epsilon, delta, emit)
    for p_V, q_V in toy_pairs().values():
        q_V = drawn_from(q_V, drawn)
        threshold = min(epsilon, delta * math.exp(-scipy.special.entr(p_V.numpy()).sum()))
        accepted_V = q_V * (p_V > threshold)
        left_V = p_V if emit == "sample" else drawn_from(p_V, "chosen")
        pi_V = accepted_V + (1 - accepted_V.sum()) * left_V
        assert (output_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10
        assert (enumerated_distribution(rule, p_V, q_V) - pi_V).abs().max() < 1e-10


def test_the_bound_names_the_threshold():
    bound = Typical(0.1, 0.4).bound
    assert bound.words == "every accepted token has p > min(0.1, 0.4 exp(-H(p)))"
    assert (bound.threshold, bound.divergence) == (0.1, None)


@pytest.mark.parametrize("rule", [Typical(0.0, 0.3), Typical(0.09, 0.0)])
def test_at_threshold_zero_every_possible_token_is_accepted(rule):
    for p_V, q_V in random_pairs(500, seed=3):
        assert (rule.acceptance(p_V, q_V).bool() == (p_V > 0)).all()


def test_at_threshold_one_nothing_is_accepted():
    for p_V, q_V in random_pairs(500, seed=3):
        assert not Typical(1.0, math.inf).acceptance(p_V, q_V).any()


def test_the_best_token_passes_where_delta_is_below_one():
    for p_V, q_V in random_pairs(2_000, seed=4):
        assert Typical(1.0, 0.999).acceptance(p_V, q_V)[p_V.argmax()] == 1


@EMITS
def test_at_temperature_zero_it_is_greedy_token_for_token(emit):
    target, guess = ToyModel.random(4, seed=1), ToyModel.random(4, seed=1, scale=1.0)
    plain, typical = (
        sample_rounds(
            target,
            ToyDrafter(guess),
            verification,
            4,
            length=32,
            num_rows=8,
            distribution=greedy_distribution,
        )
        for verification in (Greedy(), Typical(emit=emit))
    )
    assert (plain == typical).all()


def test_argmax_mode_is_deterministic_given_the_draft():
    """With chosen drafts all rows have the same output: the bonus token is the argmax, too."""
    target, guess = ToyModel.random(4, seed=5), ToyModel.random(4, seed=6)
    for num_tokens in (0, 1, 4):
        tokens_BK = sample_rounds(
            target,
            ToyDrafter(guess, drawn="chosen"),
            Typical(0.2, 0.9, "argmax"),
            num_tokens,
            length=32,
            num_rows=32,
        )
        assert (tokens_BK == tokens_BK[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_the_real_sampler_has_the_distribution(drawn):
    """False alarm with probability 1e-4 per case."""
    assert sampled_against_closed_form(Typical(0.3, 0.9), drawn=drawn) > 1e-4


# ---------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class EntropyUpsideDown(Typical):
    """Wrong: exp(H), so that the threshold rises with the entropy."""

    def _threshold(self, p_V):
        entropy = torch.special.entr(p_V).sum(-1, keepdim=True)
        return (self.delta * entropy.exp()).clamp(max=self.epsilon)


@dataclass(frozen=True)
class Greater(Typical):
    """Wrong: takes the larger of the two thresholds."""

    def _threshold(self, p_V):
        entropy = torch.special.entr(p_V).sum(-1, keepdim=True)
        return (self.delta * (-entropy).exp()).clamp(min=self.epsilon)


@dataclass(frozen=True)
class Swapped(Typical):
    """Wrong: ε and δ exchanged, as in the defaults of a helper in the authors' code."""

    def _threshold(self, p_V):
        return Typical(min(self.delta, 1.0), self.epsilon)._threshold(p_V)


@dataclass(frozen=True)
class EntropyInBits(Typical):
    """Wrong: the logarithm to base 2."""

    def _threshold(self, p_V):
        entropy = torch.special.entr(p_V).sum(-1, keepdim=True) / math.log(2)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)


@pytest.mark.parametrize("mutant", [EntropyUpsideDown, Greater, Swapped, EntropyInBits])
def test_mutants_are_rejected(mutant):
    assert disagreement(mutant, 400) > 10
