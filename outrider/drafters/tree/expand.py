"""Expands the most probable nodes of a tree, level by level. Eager code and compiled programs share
this loop.

    value of a node v   P(v) = product of q along the path to v
    per level           the k nodes of largest P get their k best tokens as children

All children are candidates; which of them a draft keeps is the caller's choice (``dynamic.py``), as
is where the distributions come from. The nodes that are expanded are the beams of a beam search.

Legend: B rows, n nodes expanded in a level, k children of each, E = nk candidates of a level, C
candidates of all levels, M nodes expanded below the root, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.drafters.search.beam_tree import BeamTree

LogDistributions = Callable[[BeamTree, Tensor], Tensor]
"""From the nodes to be expanded and log P of each (B, n) to log q after them, (B, n, V)."""


class Candidates(NamedTuple):
    """The children of all expanded nodes, level by level.

    Attributes:
        token_BC: their tokens.
        parent_BC: their parents, numbered like the candidates, from 1 on; 0 is the root.
        score_BC: log P, -inf of nodes that do not exist.
    """

    token_BC: Tensor
    parent_BC: Tensor
    score_BC: Tensor


def expand(
    root: BeamTree, depth: int, width: int, log_distributions: LogDistributions
) -> tuple[Candidates, BeamTree]:
    """All candidates, and the nodes that were expanded.

    Args:
        root: one beam without tokens.
        depth: levels of candidates, at least 1.
        width: k, at most V.
        log_distributions: log q, at most 0, lest a child outrank its parent.
    """
    tree, num_candidates = root, 0
    node_Bn = root.tokens_BM.new_zeros(root.path_BnK.shape[:2])
    score_Bn: Tensor = torch.zeros_like(node_Bn, dtype=torch.float32)
    levels = []
    for level in range(depth):
        log_q_Bnk, token_Bnk = log_distributions(tree, score_Bn).topk(width)
        score_BE = (score_Bn[..., None] + log_q_Bnk).flatten(1)
        token_BE = token_Bnk.flatten(1)
        levels.append(Candidates(token_BE, node_Bn.repeat_interleave(width, 1), score_BE))
        if level + 1 < depth:
            score_Bn, index_Bn = (x_BE[:, :width] for x_BE in by_score(score_BE))
            node_Bn = index_Bn + 1 + num_candidates
            tree = tree.grown(index_Bn // width, token_BE.gather(1, index_Bn))
        num_candidates += token_BE.shape[1]
    return Candidates(*(torch.cat(each, 1) for each in zip(*levels, strict=True))), tree


def expanded_nodes(score_BC: Tensor, depth: int, width: int) -> Tensor:
    """The candidates that were expanded, by number and in their order, (B, M)."""
    nodes, first = [], 0
    for num in [width, *[width * width] * (depth - 2)][: depth - 1]:
        index_BE = by_score(score_BC[:, first : first + num])[1]
        nodes.append(index_BE[:, :width] + 1 + first)
        first += num
    return torch.cat([score_BC.new_zeros(len(score_BC), 0, dtype=torch.int64), *nodes], 1)


def by_score(score_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in descending order, and their indices; the first of equals comes first."""
    ordered = score_BC.sort(dim=1, descending=True, stable=True)
    return ordered.values, ordered.indices


def depths(depth: int, width: int) -> list[int]:
    """The depth of each candidate of so many levels, in their order."""
    of_levels = [width] + [width * width] * (depth - 1)
    return [level for level, num in enumerate(of_levels, 1) for _ in range(num)]
