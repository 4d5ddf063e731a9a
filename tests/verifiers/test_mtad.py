"""MTAD on trees: constructed beams, its limits, its chain, mutants.

Legend: B rows, N nodes, V vocabulary.
"""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from toy_trees import TreeDrafter, chain_of, same, stream

from outrider.core import Draft
from outrider.core.errors import InvalidParameterError
from outrider.testing import ToyDrafter, ToyModel, check_verifier, enumerate_round
from outrider.verifiers.joint import Joint
from outrider.verifiers.mtad import Mtad

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)


def beams(
    steps: list[tuple[int, float, float]], seen: list[bool] | None = None
) -> tuple[Draft, Tensor]:
    """A tree whose nodes 1, 2, … have these (parent, p, q) and different tokens, and the target."""
    N = len(steps) + 1
    p_BNV, q_BNV = torch.zeros(1, N, N).double(), torch.zeros(1, N, N).double()
    for node, (parent, p, q) in enumerate(steps, 1):
        p_BNV[0, parent, node], q_BNV[0, parent, node] = p, q
    for probs_BNV in (p_BNV, q_BNV):  # token 0 has the remaining mass
        probs_BNV[..., 0] = 1 - probs_BNV.sum(-1)
    assert float(torch.minimum(p_BNV, q_BNV).min()) >= 0
    parents_BN = torch.tensor([[-1, *(parent for parent, _, _ in steps)]])
    mask_BN = torch.tensor([[True, *(seen or [True] * (N - 1))]])
    return Draft(torch.arange(N)[None], parents_BN, mask_BN, q_BNV, "iid"), p_BNV


def path(rule: Mtad, draft: Draft, p_BNV: Tensor) -> list[int]:
    verdict = rule(draft, p_BNV, stream(1))
    return verdict.path_BD[0, : int(verdict.num_accepted_B)].tolist()


#      1 (P .3 Q .5) - 3 (P .03 Q .4) - 5 (P .024 Q .04)
# root
#      2 (P .2 Q .3) - 4 (P .18 Q .15) - 6 (P .036 Q .03)
TWO_BEAMS = [
    *[(0, 0.3, 0.5), (0, 0.2, 0.3)],
    *[(1, 0.1, 0.8), (2, 0.9, 0.5)],
    *[(3, 0.8, 0.1), (4, 0.2, 0.2)],
]


@pytest.mark.parametrize(
    ("tau", "accepted"),
    [
        (0.0, [2, 4, 6]),  # P is larger at 6
        (0.7, [2, 4, 6]),  # .036 / .04 = .9; 5 alone: .6
        (0.59, [2, 4, 6]),
        (0.89, [2, 4, 6]),
        (0.91, []),  # .3 / .5 fails, and so does .18 / .4
    ],
)
def test_two_beams(tau: float, accepted: list[int]) -> None:
    assert path(Mtad(tau), *beams(TWO_BEAMS)) == accepted


@pytest.mark.parametrize(
    ("tau", "accepted"), [(0.0, [2, 4]), (0.44, [2, 4]), (0.46, [1]), (0.59, [1]), (0.61, [])]
)
def test_two_shorter_beams(tau: float, accepted: list[int]) -> None:
    """Node 4 is compared with the Q of node 3: .18 / .4 = .45, though its own ratio is above 1."""
    assert path(Mtad(tau), *beams(TWO_BEAMS[:4])) == accepted


def test_nodes_that_do_not_exist_have_no_influence() -> None:
    seen = [True, True, False, True, False, True]
    draft, p_BNV = beams(TWO_BEAMS, seen)
    assert path(Mtad(0.99), draft, p_BNV) == [2, 4, 6]
    draft, p_BNV = beams(TWO_BEAMS, [True, True, True, True, True, False])
    assert path(Mtad(0.59), draft, p_BNV) == [1, 3, 5]


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0, 3.0])
def test_contract(tau: float) -> None:
    found = check_verifier(Mtad(tau), accepts_own_distribution=tau < 1)
    assert (max(found.values()) < 1e-12) == (tau >= 1)
    assert Mtad(tau).bound.threshold == tau


def test_from_one_on_it_is_plain_sampling() -> None:
    result = enumerate_round(TARGET, TreeDrafter(GUESS, [0, 0, 1]), Mtad(1.0), 3)
    assert result.total_variation < 1e-12
    assert result.acceptance_length == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_on_a_chain_it_is_the_joint_rule(tau: float) -> None:
    p_BNV = (1.5 * torch.randn(1000, 9, 5)).softmax(-1)
    q_BDV = (1.5 * torch.randn(1000, 8, 5)).softmax(-1)
    draft = chain_of(torch.randint(5, (1000, 8)), q_BDV)
    verdicts = [rule(draft, p_BNV, stream(1000)) for rule in (Mtad(tau), Joint(tau))]
    assert same(*verdicts, draft)


def test_accepts_less_the_higher_tau() -> None:
    """For each of 500 fixed trees."""
    N, parents = 9, [-1, 0, 0, 1, 2, 2, 3, 4, 7]
    p_BNV, q_BNV = ((1.5 * torch.randn(500, N, 5)).softmax(-1) for _ in range(2))
    mask_BN = torch.ones(500, N, dtype=torch.bool)
    parents_BN = torch.tensor(parents).expand(500, N)
    draft = Draft(torch.randint(5, (500, N)), parents_BN, mask_BN, q_BNV, "iid")
    numbers = [
        Mtad(tau)(draft, p_BNV, stream(500)).num_accepted_B for tau in (0, 0.01, 0.1, 0.5, 0.9, 1)
    ]
    for more_B, fewer_B in itertools.pairwise(numbers):
        assert (more_B >= fewer_B).all()
        assert (more_B > fewer_B).any()


@pytest.mark.parametrize("tau", [-0.1, math.inf, math.nan])
def test_tau_outside_its_range(tau: float) -> None:
    with pytest.raises(InvalidParameterError, match=r"tau=.*must be finite and at least 0"):
        Mtad(tau)


def test_an_empty_draft() -> None:
    result = enumerate_round(TARGET, ToyDrafter(GUESS), Mtad(), 0, length=2)
    assert result.total_variation < 1e-12
    assert path(Mtad(), Draft.root_only(torch.tensor([1])), torch.ones(1, 1, 3)) == []


@dataclass(frozen=True)
class EachAgainstItself(Mtad):
    """Wrong: compares each beam with its own Q, as a commented-out line of the code does."""

    def best_of_depth(self, draft: Draft, log_Q_BN: Tensor) -> Tensor:
        return log_Q_BN


@dataclass(frozen=True)
class AgainstTheWholeTree(Mtad):
    """Wrong: compares every node with the largest Q of any depth."""

    def best_of_depth(self, draft: Draft, log_Q_BN: Tensor) -> Tensor:
        return log_Q_BN[:, 1:].amax(1, keepdim=True).expand_as(log_Q_BN)


def test_mutants_are_rejected() -> None:
    """With the constructed beams, [1] is correct for a threshold of 0.46 and [2, 4, 6] for 0.7."""
    assert path(EachAgainstItself(0.46), *beams(TWO_BEAMS[:4])) != [1]
    assert path(AgainstTheWholeTree(0.7), *beams(TWO_BEAMS)) != [2, 4, 6]
