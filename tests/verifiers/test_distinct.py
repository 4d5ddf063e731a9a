"""Siblings without replacement: the distribution, the cover, the gain over independent ones,
mutants.

Legend: V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from toy_trees import TreeDrafter

from outrider.testing import (
    ToyDrafter,
    ToyModel,
    check_verifier,
    chi2,
    enumerate_round,
    mutants,
)
from outrider.verifiers import Rejection
from outrider.verifiers.distinct import Distinct, without

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
CERTAIN_GUESS = ToyModel.random(3, seed=33, num_impossible=2)


def test_contract() -> None:
    found = check_verifier(Distinct())
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("row_tokens", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_lossless_by_enumeration(width: int, row_tokens: int) -> None:
    """Chains, and trees whose budget is too small for their last siblings."""
    num_tokens = min(4, 2 + width)
    result = enumerate_round(
        TARGET,
        ToyDrafter(GUESS, width, "distinct"),
        Distinct(),
        num_tokens,
        row_tokens=min(row_tokens, num_tokens),
    )
    assert result.total_variation < 1e-12


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("num_impossible", [0, 1, 2])
def test_lossless_where_subtrees_are_dropped_and_supports_are_small(
    width: int, num_impossible: int
) -> None:
    """Unlikely tokens get no children, and siblings stop where no mass is left."""
    target = ToyModel.random(3, seed=3, num_impossible=num_impossible // 2)
    guess = ToyModel.random(3, seed=4, num_impossible=num_impossible)
    drafter = ToyDrafter(guess, width, "distinct", confidence=0.4)
    assert enumerate_round(target, drafter, Distinct(), 4).total_variation < 1e-12


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
@pytest.mark.parametrize("guess", [CERTAIN_GUESS, ToyModel.random(3, seed=5, num_impossible=1)])
def test_the_cover_is_lossless(guess: ToyModel, num_tokens: int) -> None:
    """A drafter that continues uniformly where its distribution has no mass left."""
    drafter = TreeDrafter(guess, [0, 0, 0, 1], "distinct", cover=True)
    result = enumerate_round(TARGET, drafter, Distinct(), num_tokens)
    assert result.total_variation < 1e-12
    if num_tokens == 3:
        assert result.acceptance_length == pytest.approx(2, abs=1e-12)  # all V tokens are children


def test_the_distribution_of_the_next_sibling() -> None:
    q_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    q_V = without(q_V, torch.tensor(0))
    assert torch.allclose(q_V, torch.tensor([0.0, 0.0, 0.6, 0.4]))
    q_V = without(without(q_V, torch.tensor(2)), torch.tensor(3))
    assert q_V.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert without(q_V, torch.tensor(1)).tolist() == [0.0] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "width", "num_tokens"), [(3, 2, 3), (4, 2, 2), (4, 3, 3)])
def test_accepts_more_than_independent_siblings(
    vocab_size: int, width: int, num_tokens: int
) -> None:
    """Exactly, on 6 random pairs, alternating between soft and sharp ones."""
    gains = []
    for seed in range(6):
        target, guess = (
            ToyModel.random(vocab_size, seed=s, scale=(1.0, 1.5, 4.0)[seed % 3])
            for s in (seed, 1000 + seed)
        )
        distinct = ToyDrafter(guess, width, "distinct")
        gain = enumerate_round(target, distinct, Distinct(), num_tokens, length=1)
        loss = enumerate_round(target, ToyDrafter(guess, width), Rejection(), num_tokens, length=1)
        gains.append(gain.acceptance_length - loss.acceptance_length)
    assert min(gains) > -1e-12
    assert sum(gains) / len(gains) > 0.03


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [
        ToyDrafter(GUESS, 2, "distinct"),
        ToyDrafter(ToyModel.random(3, seed=33, num_impossible=1), 3, "distinct"),
        TreeDrafter(CERTAIN_GUESS, [0, 0, 1, 1], "distinct", cover=True),
    ],
    ids=["pairs", "triples", "cover"],
)
def test_the_real_sampler_has_the_distribution(drafter: ToyDrafter) -> None:
    """False alarm with probability 1e-4 each."""
    assert chi2(TARGET, drafter, Distinct(), 4) > 1e-4


@pytest.mark.parametrize(
    "mutant", [mutants.WithReplacementAssumed(), mutants.UnrenormalisedDraftDistribution()]
)
@pytest.mark.parametrize("width", [2, 3])
def test_the_mutants_of_the_kit_are_rejected(mutant: mutants.Reference, width: int) -> None:
    drafter = ToyDrafter(GUESS, width, "distinct")
    assert enumerate_round(TARGET, drafter, Distinct(), width).total_variation < 1e-12
    assert enumerate_round(TARGET, drafter, mutant, width).total_variation > 5e-3


@dataclass(frozen=True)
class NoCover(Distinct):
    """Wrong: where q has no mass left it stays zero, so every token with p > 0 is accepted."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        left_V, next_V = super().reject(p_V, q_V, x)
        assert q_V is not None
        assert next_V is not None
        used_up = q_V.scatter(-1, x[..., None], 0.0).sum(-1, keepdim=True) == 0
        return left_V, next_V.masked_fill(used_up, 0.0)


@dataclass(frozen=True)
class CoverOfEverything(NoCover):
    """Wrong: the cover is uniform over all tokens, including rejected ones."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        left_V, next_V = super().reject(p_V, q_V, x)
        assert next_V is not None
        used_up = next_V.sum(-1, keepdim=True) == 0
        return left_V, torch.where(used_up, 1 / next_V.shape[-1], next_V)


@dataclass(frozen=True)
class TargetNotReduced(Distinct):
    """Wrong: removes the rejected token from q, but verifies the next sibling with the full p."""

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return p_V, super().reject(p_V, q_V, x)[1]


@pytest.mark.parametrize("mutant", [NoCover(), CoverOfEverything(), TargetNotReduced()])
def test_mutants_are_rejected(mutant: Distinct) -> None:
    drafter = TreeDrafter(CERTAIN_GUESS, [0, 0, 0], "distinct", cover=True)
    assert enumerate_round(TARGET, drafter, Distinct(), 2).total_variation < 1e-12
    assert enumerate_round(TARGET, drafter, mutant, 2).total_variation > 5e-3
