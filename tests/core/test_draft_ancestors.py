"""Ancestors of nodes, compared with following parents one at a time.

Legend: B rows, N nodes.
"""

from dataclasses import replace

import pytest
import torch

from outrider.core import Draft


def draft_of(parents: list[list[int]]) -> Draft:
    parents_BN = torch.tensor(parents)
    return Draft(parents_BN, parents_BN, parents_BN >= -1, None, "chosen")


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 9, 17, 64])
@pytest.mark.parametrize("reach", [1, 2, 64])
def test_ancestors_and_depths(num_nodes: int, reach: int) -> None:
    """Chains (reach 1), deep trees and wide ones; each row has a different tree."""
    generator = torch.Generator().manual_seed(num_nodes)
    back_BN = torch.randint(1, reach + 1, (5, num_nodes), generator=generator)
    parents_BN = (torch.arange(num_nodes) - back_BN).clamp(min=0)
    parents_BN[:, 0] = -1
    draft = draft_of(parents_BN.tolist())
    for row, parents in enumerate(parents_BN.tolist()):
        for node in range(num_nodes):
            above, i = {node}, node
            while parents[i] >= 0:
                i = parents[i]
                above.add(i)
            assert set(draft.ancestors_BNN[row, node].nonzero()[:, 0].tolist()) == above
            assert int(draft.depth_BN[row, node]) == len(above) - 1


def test_trees_of_one_shape_have_the_structure_of_others() -> None:
    parents = (-1, 0, 0, 1, 1, 4, 2, 0)
    tokens_BN = torch.arange(24).view(3, 8)
    draft = Draft.tree(parents, tokens_BN, tokens_BN >= 0, None, "chosen", 5)
    other = draft_of([list(parents)] * 3)
    for name in ("parents_BN", "ancestors_BNN", "depth_BN", "walk_step_BN"):
        one, plain = getattr(draft, name), getattr(other, name)
        assert one.dtype == plain.dtype
        assert torch.equal(one, plain), name
    assert (draft.walk_length_bound, other.walk_length_bound) == (5, 7)
    assert draft.parents == parents
    changed = replace(draft, parents_BN=torch.arange(-1, 7).expand(3, -1))
    assert changed.parents is None
    assert torch.equal(changed.depth_BN[0], torch.arange(8))
