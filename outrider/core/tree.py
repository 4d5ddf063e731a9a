"""The constant tensors of trees of fixed shape, which are the same in all rows and rounds.

As with chains (``chain.py``), computing them anew takes longer than a round can spare, so they are
cached. All rows of a batch share the memory of one row: nobody may write into them.

Legend: B rows, N nodes.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.recording import keep_for_capture


class TreeTensors(NamedTuple):
    """The structure of B equal trees of N nodes.

    Attributes:
        parents_BN: of each node; -1 for the root.
        ancestors_BNN: ``[b, i, j]`` is true iff j is i or an ancestor of i.
        depth_BN: number of edges between each node and the root.
    """

    parents_BN: Tensor
    ancestors_BNN: Tensor
    depth_BN: Tensor


def tree_tensors(parents: tuple[int, ...], B: int, device: torch.device) -> TreeTensors:
    """The structure of trees with these parents, that of the root being -1. Read-only."""
    # where operators are captured, the first run has made them: they are copies from the host
    make = _tree_tensors if torch.compiler.is_compiling() else _cached_tree_tensors
    found = make(parents, B, device)
    keep_for_capture(found)
    return found


def _tree_tensors(parents: tuple[int, ...], B: int, device: torch.device) -> TreeTensors:
    ancestors: list[list[bool]] = []
    for node, parent in enumerate(parents):
        above = [False] * len(parents) if parent < 0 else list(ancestors[parent])
        above[node] = True
        ancestors.append(above)
    depths = [sum(above) - 1 for above in ancestors]
    one = (torch.tensor(each, device=device)[None] for each in (parents, ancestors, depths))
    return TreeTensors(*(each.expand(B, *each.shape[1:]) for each in one))


_cached_tree_tensors = lru_cache(maxsize=256)(torch.inference_mode(False)(_tree_tensors))
