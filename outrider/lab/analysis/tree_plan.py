"""Sequoia's dynamic program: the token tree with the most expected tokens, or the fastest one.

Chen, May, Svirschevski, Huang, Ryabinin, Jia and Chen, "Sequoia: Scalable, Robust, and
Hardware-aware Speculative Decoding", 2024, sections 3.1 and 3.3.

Let p_b be the probability that the b-th child of a node is the one that is accepted, the same for
every node (the paper's positional acceptance). A round that drafts a tree then emits on average

    F(tree) = sum over nodes v of the product of p_rank along the path to v

tokens, where the root stands for the token that the target adds itself. The best tree of at most m
nodes and l levels, with b children at its root, has

    T(m, l, 0) = 1,   T(m, l, b) = -inf where m <= b or l = 0 < b,   else
    T(m, l, b) = max over y of  T(y, l, b-1) + p_b max_b' T(m-y, l-1, b')

expected tokens, where y nodes go to the root and its first b-1 children, and the others to the b-th
child. The best (m, l) depends on the hardware: it minimises (l t_draft + t_target(m)) / T, the
seconds per token.

A node has exactly b children, since p_b need not decrease with b. m and l are upper limits, whereas
Sequoia's m is exact. So ranks that are never accepted make a tree smaller, not worse.

Legend: M numbers of nodes (0 to the limit, root included), R ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.errors import InvalidParameterError

RankPath = tuple[int, ...]
"""The rank of every node on the way from the root's child down to a node."""


@dataclass(frozen=True)
class TreePlan:
    """A tree with its expected tokens and time.

    Attributes:
        paths: the rank path of every drafted node, in breadth-first order; empty for no draft.
        tokens: expected tokens per round.
        seconds: per round; None if no times were given.
    """

    paths: tuple[RankPath, ...]
    tokens: float
    seconds: float | None = None

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)


def best_tree(acceptance: Sequence[float], num_nodes: int, depth: int) -> TreePlan:
    """The tree with the most expected tokens.

    Args:
        acceptance: p_b by rank, none negative, in total at most 1.
        num_nodes: most nodes, the root included, 2 to 256.
        depth: most levels, 1 to 64.

    Raises:
        InvalidParameterError: a number outside its range.
    """
    return _DynamicProgram(acceptance, num_nodes, depth).plan(num_nodes, depth)


def fastest_tree(
    acceptance: Sequence[float],
    num_nodes: int,
    depth: int,
    target_seconds: Callable[[int], float],
    draft_seconds: float,
) -> TreePlan:
    """The tree with the fewest seconds per token; an empty one if plain decoding is faster.

    Args:
        acceptance: p_b by rank, none negative, in total at most 1.
        num_nodes: most nodes, the root included, 2 to 256.
        depth: most levels, 1 to 64.
        target_seconds: seconds of a target forward pass over 1 to ``num_nodes`` nodes, measured.
        draft_seconds: seconds of a draft forward pass; every level takes one.

    Raises:
        InvalidParameterError: a number outside its range.
    """
    program = _DynamicProgram(acceptance, num_nodes, depth)
    times = [target_seconds(m) for m in range(1, num_nodes + 1)]
    best, best_per_token = TreePlan((), 1.0, times[0]), times[0]
    for m in range(2, num_nodes + 1):
        for levels in range(1, depth + 1):
            seconds, tokens = levels * draft_seconds + times[m - 1], program.tokens(m, levels)
            if seconds / tokens < best_per_token:
                best_per_token = seconds / tokens
                best = replace(program.plan(m, levels), seconds=seconds)
    return best


class _DynamicProgram:
    """The table of T(m, l, b), filled once for all m and l.

    Args:
        acceptance: p_b by rank.
        num_nodes: the largest m.
        depth: the largest l.
    """

    def __init__(self, acceptance: Sequence[float], num_nodes: int, depth: int) -> None:
        _check("num_nodes", num_nodes, 2, 256)
        _check("depth", depth, 1, 64)
        p_R = _checked(acceptance)[: num_nodes - 1]
        M = num_nodes + 1
        node_M = torch.arange(M)
        one_M = torch.where(node_M > 0, 1.0, -torch.inf).double()
        others_MM = node_M[:, None] - node_M  # m - y, by m and y
        impossible_MM = (others_MM <= 0) | (node_M == 0)
        others_MM = others_MM.clamp(min=0)
        self._best = [one_M]
        self._children = [torch.zeros_like(node_M)]
        self._split: list[list[Tensor]] = [[]]
        for _ in range(depth):
            table, split = [one_M], []
            for p in p_R:
                value_MM = table[-1] + p * self._best[-1][others_MM]
                most = value_MM.masked_fill(impossible_MM, -torch.inf).max(1)
                table.append(most.values)
                split.append(most.indices)
            best = torch.stack(table).max(0)
            self._best.append(best.values)
            self._children.append(best.indices)
            self._split.append(split)

    def tokens(self, num_nodes: int, depth: int) -> float:
        """Expected tokens of the best tree within these limits."""
        return float(self._best[depth][num_nodes])

    def plan(self, num_nodes: int, depth: int) -> TreePlan:
        """The best tree within these limits."""
        paths = sorted(self._paths((), num_nodes, depth), key=lambda path: (len(path), path))
        return TreePlan(tuple(paths), self.tokens(num_nodes, depth))

    def _paths(self, parent: RankPath, num_nodes: int, depth: int) -> Iterator[RankPath]:
        """The rank paths of all nodes below ``parent`` in its best subtree.

        Args:
            parent: rank path of the subtree's root.
            num_nodes: most nodes of the subtree, its root included.
            depth: most levels below its root.
        """
        for b in range(int(self._children[depth][num_nodes]), 0, -1):
            left = int(self._split[depth][b - 1][num_nodes])
            child = (*parent, b - 1)
            yield child
            yield from self._paths(child, num_nodes - left, depth - 1)
            num_nodes = left


def _checked(acceptance: Sequence[float]) -> list[float]:
    p_R = [float(p) for p in acceptance]
    if not p_R or not all(0 <= p <= 1 for p in p_R) or sum(p_R) > 1 + 1e-9:
        raise InvalidParameterError(
            f"acceptance={p_R}: must be probabilities by rank, at least one, in total at most 1"
        )
    return p_R


def _check(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidParameterError(
            f"{name}={value!r}: must be a whole number from {least} to {most}"
        )
