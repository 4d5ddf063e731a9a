"""K-SEQ: the distribution for drafts of every shape, ρ*, the case K = 1, and mutants.

Legend: B rows, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from random_distributions import random_pairs
from torch import Tensor
from toy_trees import TreeDrafter, chain_of, same, sequences, stream

from outrider.core import Draft, Stream, Verdict
from outrider.core.errors import IncompatibleError
from outrider.core.recording import capturing
from outrider.testing import ToyDrafter, ToyModel, check_verifier, chi2, enumerate_round
from outrider.verifiers import Block, Rejection, spectr
from outrider.verifiers.spectr import Spectr, common, some_accepted

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
TWO_BY_TWO = sequences(2, 2)


@pytest.mark.slow
def test_contract() -> None:
    found = check_verifier(Spectr())
    assert max(found.values()) < 1e-12


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ρ found by few bisections: most of an enumeration's time goes into them, and its result
    does not depend on how many there are, as
    ``test_the_distribution_does_not_depend_on_how_well_rho_is_found`` shows."""
    monkeypatch.setattr(spectr, "_NUM_BISECTIONS", 2 * spectr._HALVINGS)


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("by_depth", [False, True], ids=["by sequence", "by depth"])
@pytest.mark.parametrize("row_tokens", [2, 3, 4])
def test_lossless_by_enumeration(by_depth: bool, row_tokens: int) -> None:
    """Two sequences of two tokens, cut by smaller budgets."""
    drafter = TreeDrafter(GUESS, sequences(2, 2, by_depth=by_depth))
    result = enumerate_round(TARGET, drafter, Spectr(), 4, row_tokens=row_tokens, length=3)
    assert result.total_variation < 1e-12
    if row_tokens == 4:
        chain = ToyDrafter(GUESS)
        others = [enumerate_round(TARGET, chain, rule, 2) for rule in (Rejection(), Block())]
        best = max(other.acceptance_length for other in others)
        assert result.acceptance_length > best + 0.2


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        (TARGET, TreeDrafter(GUESS, TWO_BY_TWO, confidence=0.4)),
        (
            ToyModel.random(3, seed=32, num_impossible=1),
            TreeDrafter(ToyModel.random(3, seed=33, num_impossible=1), TWO_BY_TWO),
        ),
        (TARGET, TreeDrafter(GUESS, [0, 0, 0])),
        (TARGET, TreeDrafter(GUESS, [0, 0, 0, 2])),
        (TARGET, TreeDrafter(GUESS, [0, 1, 2, 0])),
    ],
    ids=["stopped early", "zeros", "three tokens", "three, one longer", "three and one"],
)
def test_lossless_for_other_shapes(target: ToyModel, drafter: TreeDrafter) -> None:
    result = enumerate_round(target, drafter, Spectr(), len(drafter.parents))
    assert result.total_variation < 1e-12


def test_drafts_from_the_targets_distribution_are_accepted_whole() -> None:
    result = enumerate_round(TARGET, TreeDrafter(TARGET, [0, 0, 1, 2]), Spectr(), 4)
    assert result.acceptance_length == pytest.approx(3, abs=1e-12)


def test_one_sequence_is_rejection_sampling_draw_for_draw() -> None:
    p_BNV = (1.5 * torch.randn(2000, 6, 7)).softmax(-1)
    q_BDV = (1.5 * torch.randn(2000, 5, 7)).softmax(-1)
    q_BDV[:500] = p_BNV[:500, :-1]
    draft = chain_of(q_BDV.flatten(0, 1).multinomial(1).reshape(2000, 5), q_BDV)
    verdicts = [rule(draft, p_BNV, stream(2000)) for rule in (Spectr(), Rejection())]
    assert same(*verdicts, draft)
    assert verdicts[0].num_accepted_B.unique().tolist() == list(range(6))


@pytest.mark.parametrize("searches", [nullcontext, capturing])
@pytest.mark.parametrize("num_draws", [1, 2, 3, 8, 64])
def test_rho_is_the_smallest_that_leaves_no_negative_weight(
    num_draws: int, searches: Callable[[], AbstractContextManager[Any]]
) -> None:
    """By the search of eager and of captured code."""
    for p_V, q_V in random_pairs(160, seed=num_draws):
        p_BV, q_BV, num_B = p_V[None], q_V[None], torch.tensor([num_draws])
        with searches():
            rho_B = Spectr().smallest_rho(p_BV, q_BV, num_B)
        assert 1 <= float(rho_B) <= num_draws
        beta_B = common(p_BV, q_BV, rho_B).sum(1).clamp(max=1)
        p_acc_B = some_accepted(beta_B, num_B)
        taken_BV = common(p_BV, q_BV, rho_B) * (p_acc_B / beta_B.where(beta_B > 0, 1))[:, None]
        assert float((p_BV - taken_BV).min()) > -1e-15
        if float(beta_B) > 0:
            assert float(taken_BV.sum()) == pytest.approx(float(p_acc_B), rel=1e-12)
        if float(rho_B) > 1 + 1e-6:
            less_B = rho_B * (1 - 1e-6)
            beta_B = common(p_BV, q_BV, less_B).sum(1)
            assert float(some_accepted(beta_B, num_B) - less_B * beta_B) > -1e-12


def test_the_distribution_does_not_depend_on_how_well_rho_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = TreeDrafter(GUESS, [0, 0, 0])
    lengths = []
    for num_bisections in (0, 1, 3, 40):
        monkeypatch.setattr(spectr, "_NUM_BISECTIONS", num_bisections)
        result = enumerate_round(TARGET, drafter, Spectr(), 3)
        assert result.total_variation < 1e-12
        lengths.append(result.acceptance_length)
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] - 0.05


@dataclass(frozen=True)
class Captured(Spectr):
    """The rule as it is captured."""

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        with capturing():
            return super().__call__(draft, p_BNV, rng)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("parents", [[0, 0, 0], TWO_BY_TWO])
def test_captured_code_is_lossless(parents: list[int]) -> None:
    drafter = TreeDrafter(GUESS, parents)
    found, eager = (
        enumerate_round(TARGET, drafter, rule, len(parents)) for rule in (Captured(), Spectr())
    )
    assert found.total_variation < 1e-12
    assert found.acceptance_length == pytest.approx(eager.acceptance_length, abs=1e-12)


def test_as_many_steps_suffice_as_a_walk_visits_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences of all lengths in any order, accepted in part or, as those of the target's
    distribution are, as a whole."""
    taken: list[tuple[int, int]] = []

    def loop(goes_on, step, state, *, at_most=spectr._NUM_BISECTIONS):
        num_steps = 0
        while goes_on(*state):
            state, num_steps = step(*state), num_steps + 1
        taken.append((num_steps, at_most))
        return state

    monkeypatch.setattr(spectr, "repeat_while", loop)
    for parents in ([0], [0, 1, 2, 3], [0, 0, 0], [0, 0, 0, 2, 1, 5, 6], TWO_BY_TWO):
        parents_BN = torch.tensor([-1, *parents]).expand(20, -1)
        mask_BN = torch.ones_like(parents_BN, dtype=torch.bool)
        p_BNV = torch.randn(20, len(parents) + 1, 3).softmax(-1)
        for q_BNV in (p_BNV, p_BNV.roll(1, 0)):
            # one token: all sequences are the same, so that all remain active
            for tokens_BN in (torch.zeros_like(parents_BN), torch.randint(3, parents_BN.shape)):
                draft = Draft(tokens_BN, parents_BN, mask_BN, q_BNV, "iid")
                longest = int(draft.walk_step_BN.max())
                draft = replace(draft, max_walk_length=longest)
                taken.clear()
                Spectr()(draft, p_BNV, stream(20))
                assert all(num_steps <= most for num_steps, most in taken)
                num_steps, most = taken[-1]
                assert most == longest
                assert num_steps <= int(draft.depth_BN.max())
                assert q_BNV is not p_BNV or num_steps == int(draft.depth_BN.max())


def test_a_tree_that_branches_below_its_root_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="branches below"):
        enumerate_round(TARGET, TreeDrafter(GUESS, [0, 0, 1, 1]), Spectr(), 4)


@pytest.mark.slow
@pytest.mark.parametrize("parents", [sequences(2, 3), sequences(4, 2, by_depth=True)])
def test_the_real_sampler_has_the_distribution(parents: list[int]) -> None:
    """False alarm with probability 1e-4 each."""
    drafter = TreeDrafter(GUESS, parents)
    assert chi2(TARGET, drafter, Spectr(), len(parents)) > 1e-4


@dataclass(frozen=True)
class RhoOfOne(Spectr):
    """Wrong: ρ = 1, rejection's acceptance, for any number of draws."""

    def smallest_rho(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor) -> Tensor:
        return torch.ones_like(num_B, dtype=torch.float64)


@dataclass(frozen=True)
class ResidualOfRejection(Spectr):
    """Wrong: draws from ``(p - q)+`` after a rejection."""

    def residual(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor, rho_B: Tensor) -> Tensor:
        return (p_BV - q_BV).clamp(min=0)


@dataclass(frozen=True)
class ResidualOfOneDraw(Spectr):
    """Wrong: subtracts from p the contribution of one draw, not of k."""

    def residual(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor, rho_B: Tensor) -> Tensor:
        return (p_BV - common(p_BV, q_BV, rho_B)).clamp(min=0)


@dataclass(frozen=True)
class AlwaysK(Spectr):
    """Wrong: counts all K sequences at each position, not those still active."""

    def smallest_rho(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor) -> Tensor:
        return super().smallest_rho(p_BV, q_BV, torch.full_like(num_B, 2))

    def residual(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor, rho_B: Tensor) -> Tensor:
        return super().residual(p_BV, q_BV, torch.full_like(num_B, 2), rho_B)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [RhoOfOne(), ResidualOfRejection(), ResidualOfOneDraw()])
def test_mutants_are_rejected_on_siblings(mutant: Spectr) -> None:
    drafter = TreeDrafter(GUESS, [0, 0])
    assert enumerate_round(TARGET, drafter, mutant, 2).total_variation > 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures("coarse")
def test_mutants_are_rejected_on_sequences() -> None:
    drafter = TreeDrafter(GUESS, TWO_BY_TWO)
    assert enumerate_round(TARGET, drafter, AlwaysK(), 4, length=3).total_variation > 1e-2
