"""Grows a token tree of fixed shape, level by level, from any source of logits.

A level is one step: the distributions after its nodes that have children, then the children, drawn
or picked. Where the logits come from is the caller's business: a draft model's forward pass per
level (``static.py``), or slots of a head that one pass has computed (``heads/``).

A budget bounds the depth, since a round emits at most one token more than its deepest path: a row
has all nodes down to its budget.

If all rows are at temperature 0, children are the best tokens by rank, whatever ``children`` is. A
row at temperature 0 among rows that sample has a distribution of one token: its independent draws
are equal, and draws without replacement end after one.

Legend: B rows, N nodes (node 0 is the root), R drafted nodes (N-1), V vocabulary; of a level: n
nodes with children, k children at most, C children in all, K nodes drafted above, M nodes in the
draft model's cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drawn, Prefix, Role, Stream
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.model import fitted
from outrider.drafters.tree.children import independent, top, without_replacement
from outrider.drafters.tree.topology import Topology
from outrider.runtime import Nodes

Children = Literal["iid", "distinct", "chosen"]


@dataclass(frozen=True)
class Level:
    """One level of a topology: the inputs of its forward pass and of the draws that follow.

    Attributes:
        depth: of the level's inner nodes; 0 for the root's.
        width: k, most children of a node.
        num_nodes: nodes of the tree from the root to the level's children.
        inner_n: the level's nodes that have children.
        above_n: the parent of each inner node, by its number among the root and the cached nodes; 0
            at the root.
        number_nk: index of the random number that draws each child.
        slot_C: index of each child among the n·k slots.
        parent_C: parent of each child.
        on_path_nK: which of the drafted nodes lie on the path to each inner node.
        on_path_nM: which of the cached nodes do, the level's own included.
        depth_M: depth of each cached node, less one.
    """

    depth: int
    width: int
    num_nodes: int
    inner_n: Tensor
    above_n: Tensor
    number_nk: Tensor
    slot_C: Tensor
    parent_C: Tensor
    on_path_nK: Tensor
    on_path_nM: Tensor
    depth_M: Tensor

    @classmethod
    def of(cls, topology: Topology, depth: int, device: torch.device) -> "Level":
        """The level at that depth."""
        tree = topology
        nodes = range(tree.num_nodes)
        inner = [i for i in nodes if tree.depths[i] == depth and tree.num_children[i]]
        children = [i for i in nodes if tree.depths[i] == depth + 1]
        cached = [i for i in nodes if 0 < tree.depths[i] <= depth and tree.num_children[i]]
        width = max(tree.num_children[i] for i in inner)
        first = {tree.parents[c]: c for c in reversed(children)}
        last = children[-1] + 1
        ancestors_NN = torch.tensor(tree.ancestors)

        def tensor(numbers: object) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return cls(
            depth,
            width,
            last,
            tensor(inner),
            tensor([[0, *cached].index(max(0, tree.parents[i])) for i in inner]),
            tensor([[min(first[i] + k, last - 1) - 1 for k in range(width)] for i in inner]),
            tensor([inner.index(tree.parents[c]) * width + tree.ranks[c] for c in children]),
            tensor([tree.parents[c] for c in children]),
            ancestors_NN[inner, 1 : children[0]].to(device),
            ancestors_NN[inner][:, cached].to(device),
            tensor([tree.depths[i] - 1 for i in cached]),
        )

    def nodes(self, num_rows: int) -> Nodes:
        """The inner nodes of so many rows as query tokens, of a level below the root's."""
        on_path_BnM = self.on_path_nM.expand(num_rows, -1, -1)
        return Nodes(on_path_BnM, self.depth_M.expand(num_rows, -1))


LevelLogits = Callable[[Tensor, Level], Tensor]
"""From the tokens so far, root first, (B, N), and a level to the logits after the level's nodes
that have children, (B, n, V)."""


class StaticTree:
    """A tree of fixed shape, grown under the sampling parameters of the target.

    Args:
        topology: the shape; budgets cut it at their depth.
        children: ``iid`` draws; ``distinct``, draws without replacement; or ``chosen``, the best
            tokens by rank, for which no distributions are computed.
        num_tokens: width of the target's logits; the source's are cut or padded to it.
        device: of the batches.

    Attributes:
        levels: of the topology, from the root down.

    Raises:
        InvalidParameterError: any other kind of children.
    """

    def __init__(
        self, topology: Topology, children: Children, num_tokens: int, device: torch.device
    ) -> None:
        if children not in get_args(Children):
            raise InvalidParameterError(
                f"children={children!r}: must be one of iid, distinct, chosen"
            )
        self.topology = topology
        self.drawn: Drawn = children
        self.num_tokens = num_tokens
        self.levels = [Level.of(topology, d, device) for d in range(topology.depth)]

    def grow(
        self,
        context: Context,
        budget: Budget,
        rng: Stream,
        logits: LevelLogits,
        drafts_B: Tensor | None = None,
    ) -> Draft:
        """A tree after the last token of each row.

        Args:
            context: the batch.
            budget: most levels.
            rng: the round's random numbers.
            logits: the source.
            drafts_B: which rows get a tree; None for all. The others get a root alone.
        """
        levels = self.levels[: budget.max_tokens]
        if not levels:
            return Draft.root_only(context.root_B)
        drawn: Drawn = "chosen" if context.distribution.greedy else self.drawn
        warp = context.distribution.logits if drawn == "chosen" else context.distribution
        u_BR = None if drawn == "chosen" else rng.uniform(Role.DRAFT, levels[-1].num_nodes - 1)

        def children(
            tokens_BN: Tensor, mask_BN: Tensor, level: Level
        ) -> tuple[Tensor, Tensor, Tensor]:
            logits_BnV = fitted(logits(tokens_BN, level), self.num_tokens)
            q_BnV = warp(logits_BnV, _prefix(context, tokens_BN, mask_BN, level))
            return q_BnV, *children_of(q_BnV, drawn, level, u_BR)

        def within(level: Level) -> list[Tensor]:
            limits = [] if budget.tokens_B is None else [budget.tokens_B > level.depth]
            return limits if drafts_B is None else [*limits, drafts_B]

        root_B1 = context.root_B[:, None]
        tokens_BN, mask_BN, recorded = grow_levels(root_B1, levels, children, within)
        probs_BNV = None if drawn == "chosen" else by_node(recorded, levels, tokens_BN.shape[1])
        return self.draft(tokens_BN, mask_BN, probs_BNV, drawn)

    def draft(
        self, tokens_BN: Tensor, mask_BN: Tensor, probs_BNV: Tensor | None, drawn: Drawn
    ) -> Draft:
        """The draft of a tree that was grown to some level; arguments as of ``Draft``."""
        N = tokens_BN.shape[1]
        if self.topology.depths[N - 1] == N - 1:
            return Draft.chain(tokens_BN, mask_BN, probs_BNV, drawn)
        parents = self.topology.parents[:N]
        most = max(self.topology.walk_steps[:N])
        return Draft.tree(parents, tokens_BN, mask_BN, probs_BNV, drawn, most)


LevelChildren = Callable[[Tensor, Tensor, Level], tuple[Tensor, Tensor, Tensor]]
"""From tokens and mask so far, (B, N), and a level to what is recorded of the level's nodes that
have children, (B, n, V), the tokens of their children, (B, n, k), and which of these exist."""


def grow_levels(
    root_B1: Tensor,
    levels: Sequence[Level],
    children: LevelChildren,
    within: Callable[[Level], Sequence[Tensor]] = lambda level: (),
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Grows a tree level by level. Eager code and compiled programs share this loop.

    Args:
        root_B1: the last committed token of each row.
        levels: from the root down.
        children: draws a level's children.
        within: which rows get the children of a level, tensors (B,) all of which must be true.

    Returns:
        Tokens and mask of the nodes, (B, N), and what was recorded of each level.
    """
    tokens_BN, mask_BN, recorded = root_B1, torch.ones_like(root_B1, dtype=torch.bool), []
    for level in levels:
        q_BnV, token_Bnk, exists_Bnk = children(tokens_BN, mask_BN, level)
        exists_BC = exists_Bnk.flatten(1)[:, level.slot_C] & mask_BN[:, level.parent_C]
        for rows_B in within(level):
            exists_BC = exists_BC & rows_B[:, None]
        tokens_BN = torch.cat([tokens_BN, token_Bnk.flatten(1)[:, level.slot_C]], 1)
        mask_BN = torch.cat([mask_BN, exists_BC], 1)
        recorded.append(q_BnV)
    return tokens_BN, mask_BN, recorded


def _prefix(context: Context, tokens_BN: Tensor, mask_BN: Tensor, level: Level) -> Prefix:
    """What precedes the children of the level's inner nodes: the paths to them, and they
    themselves."""
    B = context.num_rows
    return Prefix(
        context,
        lambda: tokens_BN[:, 1:],
        lambda: level.on_path_nK.expand(B, -1, -1),
        lambda: mask_BN[:, level.inner_n],
    )


def children_of(
    q_BnV: Tensor, drawn: Drawn, level: Level, u_BR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens of the children, (B, n, k), and which of them exist."""
    if u_BR is None:
        return top(q_BnV, level.width)
    u_Bnk = u_BR[:, level.number_nk]
    if drawn == "distinct":
        return without_replacement(q_BnV, u_Bnk)
    token_Bnk = independent(q_BnV, u_Bnk)
    return token_Bnk, torch.ones_like(token_Bnk, dtype=torch.bool)


def by_node(distributions: Sequence[Tensor], levels: Sequence[Level], num_nodes: int) -> Tensor:
    """The distribution of every node, (B, N, V); zeros for nodes without children."""
    B, _, V = distributions[0].shape
    probs_BNV = distributions[0].new_zeros(B, num_nodes, V)
    for q_BnV, level in zip(distributions, levels, strict=True):
        probs_BNV.index_copy_(1, level.inner_n, q_BnV)
    return probs_BNV
