"""Tree masks, against what they say slot by slot.

Legend: B rows, N nodes of a pass, M nodes behind the committed slots, S slots.
"""

import pytest
import torch

from outrider.runtime.attention_metadata import Nodes, tree_mask

PARENTS = [[-1, -1, 0, 2, 1], [-1, 0, 1, 1, 0]]


def ancestors(parents: list[int]) -> list[list[bool]]:
    rows: list[list[bool]] = []
    for i, parent in enumerate(parents):
        above = rows[parent] if parent >= 0 else [False] * len(parents)
        rows.append([j == i or above[j] for j in range(len(parents))])
    return rows


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("lengths", [[4, 4], [4, 2], [0, 0]])
@pytest.mark.parametrize("first", [0, 3])
def test_a_node_sees_the_text_and_its_ancestors(
    first: int, lengths: list[int], spare: int, window: int | None
) -> None:
    """Rows of one length and others, with slots beyond the nodes and without, all nodes of the
    tree and the last of them, with a sliding window and without."""
    M = len(PARENTS[0])
    above_BMM = torch.tensor([ancestors(parents) for parents in PARENTS])
    depth_BM = above_BMM.sum(2) - 1
    span = max(lengths) + M + spare
    nodes = Nodes(above_BMM[:, first:], depth_BM)
    mask_B1NS = tree_mask(nodes, torch.tensor(lengths), span, torch.float32, window)
    assert mask_B1NS.shape == (2, 1, M - first, span)
    assert set(mask_B1NS.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
    for b, length in enumerate(lengths):
        for i in range(first, M):
            for s in range(span):
                j, here = s - length, length + int(depth_BM[b, i])
                if j < 0:
                    sees, there = True, s
                else:
                    sees = j < M and bool(above_BMM[b, i, j])
                    there = length + int(depth_BM[b, j]) if j < M else s
                sees = sees and (window is None or there > here - window)
                assert bool(mask_B1NS[b, 0, i - first, s] == 0) == sees
