"""Ends of sequences: drafts are cut there, and prefixes know which positions are reachable."""

import torch

from outrider.core import Context, Draft, Ends, Lengths, Prefix
from outrider.testing import SoftmaxDistribution

ENDS = Ends.of([(7, 8), (), (9,)], [4, 99, 5])


def test_a_chain_ends_with_its_end_token() -> None:
    """The end token stays. The root, and end tokens of other rows, end nothing."""
    tokens_BN = torch.tensor([[7, 1, 8, 2, 7], [7, 7, 8, 9, 1], [9, 7, 1, 2, 9]])
    draft = ENDS.cut(Draft.chain(tokens_BN, None, None, "chosen"))
    assert draft.mask_BN.sum(1).tolist() == [3, 5, 5]
    assert draft.num_drafted_B.tolist() == [2, 4, 4]
    assert not draft.is_full


def test_a_draft_without_ends_stays_the_same_object() -> None:
    draft = Draft.chain(torch.tensor([[7, 1, 2]] * 3), None, None, "chosen")
    assert ENDS.cut(draft) is draft


def test_in_a_tree_only_descendants_of_an_end_token_are_cut() -> None:
    parents_BN = torch.tensor([[-1, 0, 0, 1, 2, 3]] * 3)
    tokens_BN = torch.tensor([[1, 7, 2, 3, 8, 4]] * 3)
    everything_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
    draft = ENDS.cut(Draft(tokens_BN, parents_BN, everything_BN, None, "chosen"))
    assert draft.mask_BN.tolist()[0] == [True, True, True, False, True, False]
    assert draft.mask_BN[1:].all()


def test_tokens_on_the_host_are_cut_too() -> None:
    assert ENDS.cut_tokens(0, [1, 8, 7]) == [1, 8]
    assert ENDS.cut_tokens(1, [1, 8, 7]) == [1, 8, 7]
    assert ENDS.cut_tokens(2, []) == []


def test_rows_come_and_go() -> None:
    kept = ENDS.keep([2, 0])
    assert kept.token_ids == (frozenset({9}), frozenset({7, 8}))
    assert kept.lengths == (5, 4)
    assert kept.join(ENDS.keep([1])).ids_BZ.tolist() == [[9, -1], [7, 8], [-1, -1]]


def test_reachable_positions() -> None:
    """Nodes that exist, before any end token and below the row's maximum length."""
    prompts = [[7, 1], [7, 1, 2], [3]]
    context = Context.start(prompts, SoftmaxDistribution(), [0] * 3, range(3), ends=ENDS)
    tokens_BN = torch.tensor([[1, 2, 3, 4], [2, 7, 8, 9], [3, 1, 9, 1]])
    mask_BN = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4])
    draft = Draft.chain(tokens_BN, mask_BN, None, "chosen")
    open_BN = Prefix.of_draft(context, draft).is_open_BM
    assert open_BN.sum(1).tolist() == [2, 2, 2]

    context.append(torch.tensor([[8], [8], [9]]), Lengths.of([1, 1, 1]))
    assert context.ended_B.tolist() == [True, False, True]
    assert Prefix.of_chain(context, []).is_open_BM.tolist() == [[False], [True], [False]]
