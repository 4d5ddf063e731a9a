"""Block verification: the distribution, the paper's example, its optimality, and mutants of its
own."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from outrider.core import Draft, Role, Stream, Verdict, row_keys
from outrider.core.errors import IncompatibleError
from outrider.testing import ToyDrafter, ToyModel, check_verifier, chi2, enumerate_round
from outrider.verifiers import Block, Rejection
from outrider.verifiers.block import path_probabilities


def test_contract() -> None:
    found = check_verifier(Block(), trees=False)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("drafter", ["model", "chosen", "confidence"])
def test_lossless_by_enumeration(drafter: str) -> None:
    target, guess = ToyModel.random(3, seed=1), ToyModel.random(3, seed=2)
    drafters = {
        "model": ToyDrafter(guess),
        "chosen": ToyDrafter(guess, drawn="chosen"),
        "confidence": ToyDrafter(guess, confidence=0.4),
    }
    assert enumerate_round(target, drafters[drafter], Block(), 3).total_variation < 1e-12


def test_the_papers_example_gives_eleven_ninths_against_ten_ninths() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3) everywhere, γ = 2: accepted tokens without the bonus
    token."""
    target = ToyModel(torch.tensor([[1.0, 2.0]], dtype=torch.float64).log(), order=0)
    draft = ToyModel(torch.tensor([[2.0, 1.0]], dtype=torch.float64).log(), order=0)
    drafter = ToyDrafter(draft)
    token = enumerate_round(target, drafter, Rejection(), 2).acceptance_length - 1
    block = enumerate_round(target, drafter, Block(), 2).acceptance_length - 1
    assert token == pytest.approx(10 / 9, abs=1e-12)
    assert block == pytest.approx(11 / 9, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_accepts_at_least_as_much_as_rejection(seed: int) -> None:
    target = ToyModel.random(3, seed=seed, num_impossible=seed % 2)
    drafter = ToyDrafter(ToyModel.random(3, seed=100 + seed, num_impossible=seed // 2 % 2))
    token, block = (
        enumerate_round(target, drafter, rule, 2).acceptance_length
        for rule in (Rejection(), Block())
    )
    assert block >= token - 1e-12


def test_one_drafted_token_is_rejection_sampling() -> None:
    target, drafter = ToyModel.random(4, seed=5), ToyDrafter(ToyModel.random(4, seed=6))
    token, block = (enumerate_round(target, drafter, rule, 1) for rule in (Rejection(), Block()))
    assert block.acceptance_length == pytest.approx(token.acceptance_length, abs=1e-12)
    assert block.total_variation < 1e-12


@pytest.mark.slow
def test_the_real_sampler_has_the_distribution() -> None:
    """False alarm with probability 1e-4."""
    target, drafter = ToyModel.random(3, seed=7), ToyDrafter(ToyModel.random(3, seed=8))
    assert chi2(target, drafter, Block(), 3) > 1e-4


def test_64_tokens_do_not_underflow() -> None:
    """60 tokens of ratio e^-2, then two of ratio e^69: a running float32 product would be 0."""
    p_BNV, q_BNV = torch.full((1, 65, 2), 0.5), torch.full((1, 65, 2), 0.5)
    p_BNV[:, :60, 0] *= torch.tensor(-2.0).exp()
    p_BNV[:, 60:62, 0], q_BNV[:, 60:62, 0] = 1.0, torch.tensor(-69.0).exp()
    tokens_BN, exists_BN = torch.zeros(1, 65, dtype=torch.int64), torch.ones(1, 65).bool()
    draft = Draft.chain(tokens_BN, exists_BN, q_BNV, "iid")
    assert (p_BNV / q_BNV)[0, :62, 0].prod() == 0
    P_BN = path_probabilities(draft, p_BNV)
    assert P_BN[0, 62] == 1
    assert P_BN[0, 30] == pytest.approx(torch.tensor(-60.0).exp().item(), rel=1e-4)


def verdict_with_every_h(draft: Draft, p_BNV: Tensor, u_BD: Tensor) -> Tensor:
    """Reference implementation of Algorithm 2 that computes every h_i: the number of accepted
    tokens."""
    P_BN = path_probabilities(draft, p_BNV)
    assert draft.probs_BNV is not None
    S_BN = (P_BN[..., None] * p_BNV - draft.probs_BNV).clamp(min=0).sum(-1)
    h_BN = torch.where((S_BN == 0) & (P_BN == 1), 1.0, S_BN / (S_BN + 1 - P_BN))
    node_N = torch.arange(draft.num_nodes)
    h_BN = torch.where(node_N == draft.num_drafted_B[:, None], P_BN, h_BN)
    good_BD = (u_BD < h_BN[:, 1:]) & draft.mask_BN[:, 1:]
    return torch.where(good_BD, node_N[1:], 0).amax(1)


@pytest.mark.parametrize("num_tokens", [1, 5, 16])
def test_skipped_positions_do_not_change_the_verdict(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    B, N, V = 500, num_tokens + 1, 30
    z_BNV = torch.randn(B, N, V, generator=generator, dtype=torch.float64)
    noise_BNV = torch.randn(B, N, V, generator=generator, dtype=torch.float64)
    p_BNV, q_BNV = z_BNV.softmax(-1), (z_BNV + 0.5 * noise_BNV).softmax(-1)
    tokens_BN = torch.multinomial(q_BNV.flatten(0, 1), 1, generator=generator).view(B, N)
    tokens_BN = tokens_BN.roll(1, 1)
    lengths_B1 = torch.randint(0, N, (B, 1), generator=generator)
    draft = Draft.chain(tokens_BN, torch.arange(N) <= lengths_B1, q_BNV, "iid")
    rng = Stream(row_keys([0] * B, list(range(B)), "cpu"), torch.full((B,), 3))
    expected_B = verdict_with_every_h(draft, p_BNV, rng.uniform(Role.ACCEPT, num_tokens))
    assert (Block()(draft, p_BNV, rng).num_accepted_B == expected_B).all()
    assert len(expected_B.unique()) > 1


def test_a_tree_is_an_error() -> None:
    tokens_BN = torch.zeros(1, 3, dtype=torch.int64)
    parents_BN = torch.tensor([[-1, 0, 0]])
    probs_BNV = torch.full((1, 3, 2), 0.5)
    draft = Draft(tokens_BN, parents_BN, torch.ones(1, 3, dtype=torch.bool), probs_BNV, "iid")
    rng = Stream(row_keys([0], [0], "cpu"), torch.tensor([1]))
    with pytest.raises(IncompatibleError, match="a single path"):
        Block()(draft, probs_BNV, rng)


@dataclass(frozen=True)
class FirstFailureStops(Block):
    """Wrong: stops at the first failure, as token-level rules do."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        verdict = super().__call__(draft, p_BNV, rng)
        u_BD = rng.uniform(Role.ACCEPT, draft.num_nodes - 1)
        P_BN = path_probabilities(draft, p_BNV)
        first_B = (u_BD < P_BN[:, 1:]).long().cumprod(1).sum(1)
        return Verdict(
            verdict.path_BD, torch.minimum(verdict.num_accepted_B, first_B), verdict.next_token_B
        )


@dataclass(frozen=True)
class LastRatioOnly(Block):
    """Wrong: h is P_i everywhere, without the mass that the residual still needs."""

    def _acceptance(self, P_B: Tensor, S_B: Tensor) -> Tensor:
        return P_B


@dataclass(frozen=True)
class SumOneEarly(Block):
    """Wrong: h_i uses the residual mass of the preceding node."""

    def _mass(self, draft: Draft, p_BNV: Tensor, P_BN: Tensor, node_B: Tensor) -> Tensor:
        return super()._mass(draft, p_BNV, P_BN, (node_B - 1).clamp(min=0))


@pytest.mark.parametrize("mutant", [FirstFailureStops(), LastRatioOnly(), SumOneEarly()])
def test_mutants_are_rejected(mutant: Block) -> None:
    target, drafter = ToyModel.random(3, seed=1), ToyDrafter(ToyModel.random(3, seed=2))
    assert enumerate_round(target, drafter, mutant, 3).total_variation > 1e-3
