"""Which token tree pays best: Sequoia's dynamic programme.

Chen, May, Svirschevski, Huang, Ryabinin, Jia and Chen, "Sequoia: Scalable, Robust, and
Hardware-aware Speculative Decoding", 2024, sections 3.1 and 3.3.

Let p_b be the probability that of a node's children the b-th is the one accepted, whatever the
node (the paper's positional acceptance). A round that drafts a tree then emits on average

    F(tree) = sum over nodes v of the product of p_rank along the path to v

tokens, the root standing for the one that the target adds itself. The best tree of at most m nodes
and l levels, with at most b children at its root, has

    T(1, l, b) = T(m, 0, b) = T(m, l, 0) = 1
    T(m, l, b) = max over y of  T(y, l, b-1) + p_b max_b' T(m-y, l-1, b')

in which y nodes go to the root and its first b-1 children, and the others to the b-th child. Which
(m, l) to take depends on the hardware: the fewest seconds per token, (l t_draft + t_target(m)) / T.

The maximum is over trees of *at most* m nodes, where Sequoia has exactly m: so a measured p_b of
zero makes trees smaller, not worse. The p_b need not fall with b.

Legend: M most nodes (root included), L most levels, K ranks; m nodes, l levels, b children.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.errors import InvalidParameterError

Path = tuple[int, ...]
"""The ranks from the root's child down to a node."""


@dataclass(frozen=True)
class TreePlan:
    """A tree and what to expect of it.

    Attributes:
        paths: the rank path of every drafted node, in breadth-first order; empty if not to draft.
        tokens: expected tokens per round.
        seconds: per round; None where no times were given.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)


def expected_tokens(paths: Sequence[Sequence[int]], acceptance: Sequence[float]) -> float:
    """F of a tree: tokens per round where the b-th child is accepted with ``acceptance[b-1]``.

    Ranks that were not measured are never accepted.
    """
    total = 1.0
    for path in paths:
        product = 1.0
        for rank in path:
            product *= acceptance[rank] if rank < len(acceptance) else 0.0
        total += product
    return total


def best_tree(acceptance: Sequence[float], num_nodes: int, depth: int) -> TreePlan:
    """The tree of most expected tokens.

    Args:
        acceptance: p_b by rank, none negative, together at most 1.
        num_nodes: most nodes, the root included, 2 to 256.
        depth: most levels, 1 to 64.

    Raises:
        InvalidParameterError: a number outside its range.
    """
    return _Programme(acceptance, num_nodes, depth).plan(num_nodes, depth)


def fastest_tree(
    acceptance: Sequence[float],
    num_nodes: int,
    depth: int,
    target_seconds: Callable[[int], float],
    draft_seconds: float,
) -> TreePlan:
    """The tree of fewest seconds per token; no tree at all where none is worth its passes.

    Args:
        acceptance: p_b by rank, none negative, together at most 1.
        num_nodes: most nodes, the root included, 2 to 256.
        depth: most levels, 1 to 64.
        target_seconds: of a pass of the target over so many nodes, 1 to ``num_nodes``; measured.
        draft_seconds: of a pass of the draft model, one of which is due per level.

    Raises:
        InvalidParameterError: a number outside its range.
    """
    programme = _Programme(acceptance, num_nodes, depth)
    plans = [TreePlan((), 1.0, target_seconds(1))]
    times = [target_seconds(m) for m in range(num_nodes + 1) if m]
    for m in range(2, num_nodes + 1):
        for l in range(1, depth + 1):
            tokens = programme.tokens(m, l)
            plans.append(TreePlan((), tokens, l * draft_seconds + times[m - 1]))
    best = min(range(len(plans)), key=lambda i: plans[i].seconds / plans[i].tokens)  # type: ignore
    return plans[best]


class _Programme:
    """The table of T, filled once for all m and l.

    Attributes:
        best_LM: max over b of T(m, l, b), at [l, m].
        table: T(m, l, b) for each l, at [b, m]; row 0 of l has no children.
        split: the y that the maximum took, at the same places.
    """

    def __init__(self, acceptance: Sequence[float], num_nodes: int, depth: int) -> None:
        pass
