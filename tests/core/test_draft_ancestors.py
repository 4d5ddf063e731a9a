"""Ancestors of nodes, compared with following parents one at a time.

Legend: B rows, N nodes.
"""

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
