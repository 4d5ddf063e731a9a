"""Best of K: its bias exists, has the expected size and grows with K; a chain is unbiased.

Legend: V vocabulary, K sequences.
"""

import pytest
import torch
from random_distributions import random_pairs, total_variation
from torch import Tensor
from toy_trees import TreeDrafter, chain_of, same, sequences, stream

from outrider.core import Draft, Stream, Verdict
from outrider.testing import ToyDrafter, ToyModel, check_verifier, enumerate_round, mutants
from outrider.verifiers import Rejection
from outrider.verifiers.best_of_k import BestOfK

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)


def distribution_of_best(p_V: Tensor, q_V: Tensor, num: int) -> Tensor:
    """Of one position: the first accepted of K draws, else the residual of one rejection."""
    common_V, left_V = torch.minimum(p_V, q_V), (p_V - q_V).clamp(min=0)
    none = 1 - common_V.sum()
    return common_V * sum(none**k for k in range(num)) + none**num * left_V / left_V.sum()


def test_contract() -> None:
    found = check_verifier(BestOfK())
    chains = [tv for case, tv in found.items() if " chain " in case]
    assert max(chains) < 1e-12  # one branch is rejection sampling
    assert max(found.values()) > 0.02


@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_bias_is_the_expected_one(num: int) -> None:
    p_V = torch.tensor([0.1, 0.2, 0.7]).double()
    q_V = torch.tensor([0.6, 0.3, 0.1]).double()
    target, guess = (ToyModel(probs_V.log()[None], order=0) for probs_V in (p_V, q_V))
    drafter = TreeDrafter(guess, [0] * num)
    result = enumerate_round(target, drafter, BestOfK(), num, length=1)
    assert torch.allclose(result.completed_S, distribution_of_best(p_V, q_V, num), atol=1e-12)


def test_the_bias_grows_with_the_number_of_branches() -> None:
    """Up to ``t - t^K``, with equality if the residual lies outside the draft's support."""
    p_V = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    q_V = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    for num in (1, 2, 4):
        off = total_variation(distribution_of_best(p_V, q_V, num), p_V)
        assert float(off) == pytest.approx(0.5 - 0.5**num, abs=1e-12)
    for p_V, q_V in random_pairs(80, seed=1):
        t = float(total_variation(p_V, q_V))
        if t > 1e-9:
            off = [
                float(total_variation(distribution_of_best(p_V, q_V, num), p_V))
                for num in (1, 2, 4)
            ]
            assert off[0] < 1e-9
            assert off[1] <= off[2] + 1e-12
            assert all(x < t - t**num + 1e-9 for x, num in zip(off, (1, 2, 4), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("parents", [sequences(2, 2), [0, 0, 1]])
def test_enumeration_shows_the_bias(parents: list[int]) -> None:
    result = enumerate_round(TARGET, TreeDrafter(GUESS, parents), BestOfK(), len(parents))
    assert result.total_variation > 0.02


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_is_the_mutant_of_the_kit(num_tokens: int) -> None:
    drafter = ToyDrafter(GUESS, 2)
    ours, kits = (
        enumerate_round(TARGET, drafter, rule, num_tokens)
        for rule in (BestOfK(), mutants.BestOfK())
    )
    assert torch.allclose(ours.completed_S, kits.completed_S, atol=1e-12)


def test_one_sequence_is_rejection_sampling_draw_for_draw() -> None:
    p_BNV = (1.5 * torch.randn(500, 5, 7)).softmax(-1)
    q_BDV = (1.5 * torch.randn(500, 4, 7)).softmax(-1)
    draft = chain_of(q_BDV.flatten(0, 1).multinomial(1).reshape(500, 4), q_BDV)
    verdicts = [rule(draft, p_BNV, stream(500)) for rule in (BestOfK(), Rejection())]
    assert same(*verdicts, draft)


class FirstBranchOnly(BestOfK):
    """Wrong: ignores all branches but the first."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        assert draft.probs_BNV is not None
        first = Draft.chain(
            draft.tokens_BN[:, :2], draft.mask_BN[:, :2], draft.probs_BNV[:, :2], "iid"
        )
        return Rejection()(first, p_BNV[:, :2], rng)


def test_a_mutant_is_rejected() -> None:
    """It is unbiased at a single position, unlike best of K."""
    drafter = TreeDrafter(GUESS, [0, 0])
    ours, mutant = (
        enumerate_round(TARGET, drafter, rule, 2, length=1).total_variation
        for rule in (BestOfK(), FirstBranchOnly())
    )
    assert mutant < 1e-12
    assert ours > 0.02
