"""Shared chain tensors equal newly created ones."""

from dataclasses import replace

import pytest
import torch

from outrider.core import Draft, Verdict, cached_arange, chain_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize(("B", "N"), [(1, 1), (1, 6), (3, 4)])
def test_a_full_chain_equals_one_with_an_explicit_mask(B, N):
    tokens_BN = torch.randint(9, (B, N), generator=torch.Generator().manual_seed(0))
    draft = Draft.chain(tokens_BN, None, None, "chosen")
    by_hand = Draft.chain(tokens_BN, torch.ones(B, N, dtype=torch.bool), None, "chosen")
    assert draft.is_full
    assert not by_hand.is_full  # a mask is never inspected
    for name in ("parents_BN", "mask_BN", "depth_BN", "num_drafted_B", "ancestors_BNN"):
        assert torch.equal(getattr(draft, name), getattr(by_hand, name)), name
    assert draft.parents_BN.tolist() == [list(range(-1, N - 1))] * B
    assert draft.depth_BN.tolist() == [list(range(N))] * B
    assert chain_tensors(B, N, CPU).path_BD.tolist() == [list(range(1, N))] * B


def test_a_chain_with_a_mask_is_not_full():
    mask_BN = torch.tensor([[True, True, False]])
    draft = Draft.chain(torch.zeros(1, 3, dtype=torch.int64), mask_BN, None, "chosen")
    assert not draft.is_full
    assert draft.num_drafted_B.tolist() == [1]


def test_a_full_chain_with_another_mask_is_not_full():
    full = Draft.chain(torch.zeros(1, 3, dtype=torch.int64), None, None, "chosen")
    shorter = replace(full, mask_BN=torch.tensor([[True, True, False]]))
    assert full.is_full
    assert not shorter.is_full
    assert shorter.num_drafted_B.tolist() == [1]


def test_a_chain_emits_its_accepted_path_and_the_next_token():
    draft = Draft.chain(torch.tensor([[9, 1, 2], [9, 3, 4], [9, 5, 6]]), None, None, "chosen")
    path_BD = chain_tensors(3, 3, CPU).path_BD
    verdict = Verdict(path_BD, torch.tensor([0, 1, 2]), torch.tensor([7, 7, 7]))
    rows = zip(verdict.emitted(draft).tolist(), range(3), strict=True)
    emitted = [row[: n + 1] for row, n in rows]
    assert emitted == [[7], [3, 7], [5, 6, 7]]


def test_shared_tensors_are_ordinary_and_cannot_be_written():
    with torch.inference_mode():
        shared = chain_tensors(2, 7, CPU), cached_arange(11, CPU, 3)
    assert not shared[0].mask_BN.is_inference()
    assert not shared[1].is_inference()
    assert shared[1].tolist() == list(range(0, 33, 3))
    with pytest.raises(RuntimeError, match="single memory location"):
        shared[0].mask_BN[:] = False
