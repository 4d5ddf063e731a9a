"""Traversal verification: the distribution on every kind of tree, block verification on chains,
mutants.

Legend: B rows, N nodes, V vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from toy_trees import TreeDrafter, chain_of, same, stream

from outrider.core import Draft, Drawn, at_node
from outrider.testing import ToyDrafter, ToyModel, check_verifier, chi2, enumerate_round
from outrider.verifiers import Block, Rejection, traversal
from outrider.verifiers.distinct import Distinct
from outrider.verifiers.traversal import Traversal, first_of_traversal

TARGET, GUESS = ToyModel.random(3, seed=32), ToyModel.random(3, seed=33)
TREES = [[0, 0, 1, 1], [0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 0, 1]]
KINDS: list[Drawn] = ["iid", "distinct", "chosen"]


@pytest.mark.slow
def test_contract() -> None:
    found = check_verifier(Traversal())
    assert max(found.values()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("parents", TREES, ids=str)
@pytest.mark.parametrize("drawn", KINDS)
def test_lossless_by_enumeration(drawn: Drawn, parents: list[int]) -> None:
    drafter = TreeDrafter(GUESS, parents, drawn)
    assert enumerate_round(TARGET, drafter, Traversal(), 4).total_variation < 1e-12


@pytest.mark.parametrize("row_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("drawn", KINDS)
def test_lossless_with_less_budget(drawn: Drawn, row_tokens: int) -> None:
    drafter = TreeDrafter(GUESS, [0, 0, 1, 1], drawn)
    result = enumerate_round(TARGET, drafter, Traversal(), 4, row_tokens=row_tokens, length=3)
    assert result.total_variation < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("drawn", KINDS)
@pytest.mark.parametrize("num_impossible", [0, 1, 2])
def test_lossless_with_zeros_and_dropped_subtrees(drawn: Drawn, num_impossible: int) -> None:
    target = ToyModel.random(3, seed=3, num_impossible=num_impossible // 2)
    guess = ToyModel.random(3, seed=4, num_impossible=num_impossible)
    drafter = TreeDrafter(guess, [0, 0, 1, 2], drawn, confidence=0.4)
    assert enumerate_round(target, drafter, Traversal(), 4).total_variation < 1e-12


@pytest.mark.parametrize("parents", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_lossless_with_sequoias_cover(parents: list[int]) -> None:
    guess = ToyModel.random(3, seed=33, num_impossible=2)
    drafter = TreeDrafter(guess, parents, "distinct", cover=True)
    assert enumerate_round(TARGET, drafter, Traversal(), len(parents)).total_variation < 1e-12


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_accepts_what_block_verification_does_on_a_chain(num_tokens: int) -> None:
    drafter = ToyDrafter(GUESS)
    ours, block = (
        enumerate_round(TARGET, drafter, rule, num_tokens) for rule in (Traversal(), Block())
    )
    assert ours.total_variation < 1e-12
    assert ours.acceptance_length == pytest.approx(block.acceptance_length, abs=1e-12)


@pytest.mark.parametrize("drawn", ["iid", "chosen"])
def test_a_chain_is_block_verification_draw_for_draw(drawn: Drawn) -> None:
    p_BNV = (1.5 * torch.randn(2000, 9, 7)).double().softmax(-1)
    q_BDV = (1.5 * torch.randn(2000, 8, 7)).double().softmax(-1)
    q_BDV[:500] = p_BNV[:500, :-1]
    draft = chain_of(q_BDV.flatten(0, 1).multinomial(1).reshape(2000, 8), q_BDV)
    length_B1 = torch.arange(2000)[:, None] % 9
    draft = replace(draft, mask_BN=torch.arange(9) <= length_B1)
    if drawn == "chosen":
        draft = replace(draft, probs_BNV=None, drawn="chosen")
    verdicts = [rule(draft, p_BNV, stream(2000)) for rule in (Traversal(), Block())]
    assert same(*verdicts, draft)
    assert len(verdicts[0].num_accepted_B.unique()) > 5


@pytest.mark.parametrize("drawn", ["iid", "distinct"])
def test_a_draft_from_the_targets_distribution_is_accepted_whole(drawn: Drawn) -> None:
    """Also on a tree: the first leaf is never dropped."""
    drafter = TreeDrafter(TARGET, [0, 0, 1, 1], drawn)
    result = enumerate_round(TARGET, drafter, Traversal(), 4, length=3)
    assert result.acceptance_length == pytest.approx(3, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["iid", "distinct"])
def test_accepts_at_least_as_much_as_from_the_root(drawn: Drawn) -> None:
    """Exactly, on 5 random pairs; the rules that walk from the root are ``Rejection`` and
    ``Distinct``."""
    gains = []
    for seed in range(5):
        target = ToyModel.random(3, seed=seed, num_impossible=seed % 2)
        drafter = TreeDrafter(ToyModel.random(3, seed=100 + seed), [0, 0, 1], drawn)
        ours, others = (
            enumerate_round(target, drafter, rule, 3, length=1).acceptance_length
            for rule in (Traversal(), Distinct() if drawn == "distinct" else Rejection())
        )
        gains.append(ours - others)
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


def plain_shares(draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """Reference implementation of ``shares``: node by node, as in the docstring of the rule."""
    share_BN, probs_BNV = torch.ones(draft.tokens_BN.shape, dtype=torch.float64), p_BNV.clone()
    q_BNV = None if draft.probs_BNV is None else draft.probs_BNV.clone()
    rule = Distinct() if draft.drawn == "distinct" else Rejection()
    for b, i in draft.mask_BN.nonzero().tolist():
        if i:
            v, x = int(draft.parents_BN[b, i]), draft.tokens_BN[b, i]
            owed_V = share_BN[b, v] * probs_BNV[b, v]
            q_V = None if q_BNV is None else q_BNV[b, v].clone()
            q = 1 if q_V is None else q_V[x]
            share_BN[b, i] = (owed_V[x] / q).clamp(max=1) if owed_V[x] > 0 else 0.0
            left_V, next_q_V = rule.reject(owed_V, q_V, x)
            left, share = left_V.sum(), share_BN[b, v].clone()
            probs_BNV[b, v] = left_V / left if left > 0 else probs_BNV[b, v]
            share_BN[b, v] = 1.0 if share == 1 else left / (left + 1 - share)
            if q_BNV is not None:
                q_BNV[b, v] = next_q_V
    return share_BN, probs_BNV


@pytest.mark.parametrize("drawn", KINDS)
def test_shares_by_node_are_those_by_walk_step(drawn: Drawn) -> None:
    """As programs compute them: over random trees of one shape, some of whose nodes do not exist,
    with zeros in both distributions. Tokens that cannot have been drawn give NaN either way."""
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12, equal_nan=True)
    generator = torch.Generator().manual_seed(5)
    for seed in range(30):
        B, N, V = 1 + seed % 4, 2 + seed % 9, 6
        back = torch.randint(1, 4, (N,), generator=generator).tolist()
        parents = (-1, *(max(0, i - back[i]) for i in range(1, N)))
        p_BNV = (2 * torch.randn(B, N, V, generator=generator)).double().softmax(-1)
        q_BNV = (2 * torch.randn(B, N, V, generator=generator)).double().softmax(-1)
        p_BNV[..., seed % V], q_BNV[..., (seed + 2) % V] = 0.0, 0.0
        tokens_BN = torch.randint(V, (B, N), generator=generator)
        mask_BN = torch.arange(N) < N - (torch.arange(B)[:, None] + seed) % 4
        mask_BN[:, 0] = True
        probs_BNV = None if drawn == "chosen" else q_BNV / q_BNV.sum(-1, keepdim=True)
        draft = Draft.tree(parents, tokens_BN, mask_BN, probs_BNV, drawn)
        share_BN, wanted_BNV = Traversal().shares(draft, p_BNV)
        found_BN, left = Traversal().shares_by_node(draft, partial(at_node, p_BNV))
        close(found_BN, share_BN)
        assert share_BN.isnan().float().mean() < 0.5
        found = [left.get(node, p_BNV[:, node]) for node in range(N)]
        close(torch.stack(found, 1), wanted_BNV)


@pytest.mark.parametrize("drawn", KINDS)
def test_shares_by_walk_step_equal_those_node_by_node(drawn: Drawn) -> None:
    """On 60 rows of different trees, some of their nodes missing."""
    generator = torch.Generator().manual_seed(1)
    B, N, V = 60, 14, 5
    p_BNV, q_BNV = (2 * torch.randn(2, B, N, V, generator=generator).double()).softmax(-1)
    q_BNV[:10] = p_BNV[:10]
    parents_BN = torch.arange(N) - torch.randint(1, 5, (B, N), generator=generator)
    parents_BN = parents_BN.clamp(min=0)
    parents_BN[:, 0] = -1
    mask_BN = torch.arange(N) < torch.randint(1, N + 1, (B, 1), generator=generator)
    tokens_BN = (torch.arange(N) + torch.arange(B)[:, None]) % V  # siblings differ
    probs_BNV = None if drawn == "chosen" else q_BNV
    draft = Draft(tokens_BN, parents_BN, mask_BN, probs_BNV, drawn)
    found, plain = Traversal().shares(draft, p_BNV), plain_shares(draft, p_BNV)
    exists_BN = draft.mask_BN
    torch.testing.assert_close(found[0][exists_BN], plain[0][exists_BN], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1][exists_BN], plain[1][exists_BN], rtol=1e-9, atol=1e-12)


def test_the_traversal_is_in_post_order() -> None:
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])
    mask_BN = torch.ones(1, 7, dtype=torch.bool)
    draft = Draft(torch.zeros_like(parents_BN), parents_BN, mask_BN, None, "chosen")
    good_BN = mask_BN.clone()
    order = []
    for _ in range(7):
        order.append(int(first_of_traversal(draft, good_BN)))
        good_BN[0, order[-1]] = False
    assert order == [6, 3, 4, 1, 5, 2, 0]


def test_64_tokens_do_not_underflow() -> None:
    """As for block verification: 60 ratios of e^-2, then two of e^69, in float32."""
    p_BNV, q_BDV = torch.full((1, 65, 2), 0.5), torch.full((1, 64, 2), 0.5)
    p_BNV[:, :60, 0] *= torch.tensor(-2.0).exp()
    p_BNV[:, :60, 1] = 1 - p_BNV[:, :60, 0]
    p_BNV[:, 60:62, 0], p_BNV[:, 60:62, 1] = 1.0, 0.0
    q_BDV[:, 60:62, 0] = torch.tensor(-69.0).exp()
    q_BDV[:, 60:62, 1] = 1 - q_BDV[:, 60:62, 0]
    draft = chain_of(torch.zeros(1, 64, dtype=torch.int64), q_BDV)
    own_BN = Traversal().shares(replace(draft, mask_BN=torch.arange(65)[None] <= 30), p_BNV)[0]
    assert float(own_BN[0, 30]) == pytest.approx(torch.tensor(-60.0).exp().item(), rel=1e-4)
    whole_BN = Traversal().shares(replace(draft, mask_BN=torch.arange(65)[None] <= 62), p_BNV)[0]
    assert float(whole_BN[0, 62]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("drawn", KINDS)
def test_the_real_sampler_has_the_distribution(drawn: Drawn) -> None:
    """False alarm with probability 1e-4 each."""
    drafter = TreeDrafter(GUESS, [0, 0, 1, 1, 2, 3], drawn)
    assert chi2(TARGET, drafter, Traversal(), 6) > 1e-4


@dataclass(frozen=True)
class ShareKept(Traversal):
    """Wrong: a node's share does not change when a child is dropped."""

    def share_after(self, share_B: Tensor, left_B: Tensor) -> Tensor:
        return share_B


@dataclass(frozen=True)
class ShareNotConditional(Traversal):
    """Wrong: a <- S, without division by the probability that nothing was accepted below."""

    def share_after(self, share_B: Tensor, left_B: Tensor) -> Tensor:
        return torch.where(share_B == 1, 1.0, left_B)


@dataclass(frozen=True)
class TokenLevelShare(Traversal):
    """Wrong: computes shares from the last ratio alone, as token-level rules do."""

    def shares(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        share_BN, probs_BNV = super().shares(draft, p_BNV)
        assert draft.probs_BNV is not None
        rows_B1 = torch.arange(len(share_BN))[:, None]
        at_BN = (rows_B1, draft.parents_BN.clamp(min=0), draft.tokens_BN)
        return (p_BNV[at_BN] / draft.probs_BNV[at_BN]).clamp(max=1), probs_BNV


@pytest.mark.parametrize("mutant", [ShareKept(), ShareNotConditional(), TokenLevelShare()])
def test_mutants_are_rejected(mutant: Traversal) -> None:
    """On a pair where an unlikely token is followed by a likely one."""
    target, drafter = ToyModel.random(3, seed=3), TreeDrafter(ToyModel.random(3, seed=4), [0, 0, 1])
    assert enumerate_round(target, drafter, Traversal(), 3).total_variation < 1e-12
    assert enumerate_round(target, drafter, mutant, 3).total_variation > 1e-2


def deepest(draft: Draft, good_BN: Tensor) -> Tensor:
    """Wrong: the deepest passing node, not the first of the traversal."""
    return torch.where(good_BN, draft.depth_BN, -1).argmax(1)


def last(draft: Draft, good_BN: Tensor) -> Tensor:
    """Wrong: the last passing node, which reverses the draw order of siblings."""
    numbers_BN = torch.arange(draft.num_nodes).expand_as(good_BN)
    return torch.where(good_BN, numbers_BN, -1).argmax(1)


@pytest.mark.parametrize("order", [deepest, last])
def test_wrong_orders_are_rejected(order: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traversal, "first_of_traversal", order)
    drafter = TreeDrafter(GUESS, [0, 0, 2])
    assert enumerate_round(TARGET, drafter, Traversal(), 3).total_variation > 1e-3


@dataclass(frozen=True)
class BonusFromTarget(Traversal):
    """Wrong: the next token is always drawn from the target distribution at the accepted node."""

    def shares(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        return super().shares(draft, p_BNV)[0], p_BNV


def test_the_residual_is_needed() -> None:
    drafter = TreeDrafter(GUESS, [0, 0])
    assert enumerate_round(TARGET, drafter, BonusFromTarget(), 2).total_variation > 1e-2
