"""A smaller model drafts a static token tree, one pass per level.

Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
Inference and Verification", ASPLOS 2024, section 3 (i.i.d. children); Yang et al., "Multi-Candidate
Speculative Decoding", 2024, and Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware
Speculative Decoding", 2024, section 3 (draws without replacement); Cai et al., "Medusa", ICML 2024,
section 2.1 (the best tokens by rank).

    children of node v  ~  q( . | context, path to v)

A forward pass feeds the nodes of a level that have children, under a tree mask, behind the nodes of
the levels above; the last level needs no pass. After a round the cache forgets all nodes. The next
round's first pass feeds the accepted path together with the new root, which costs as much as a pass
over one token as long as reading the weights takes the time, and not arithmetic. So nothing is ever
moved within the cache.

A budget is a depth, since a round emits at most one token more than its deepest path: a row has all
nodes down to its budget, whatever their number.

At temperature 0 children are the best tokens by rank, whatever ``children`` says. Rows at
temperature 0 among rows that sample have distributions of one token: their draws coincide, and
draws without replacement end after one.

Legend: B rows, N nodes (node 0 is the root), D drafted nodes (N-1), V vocabulary; of a level: n
nodes with children, k children at most, C children in all, K nodes drafted above, M nodes fed.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drawn, Prefix, Role, Stream
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.model import ModelBacked, ModelState, fitted
from outrider.drafters.tree.children import best, independent, without_replacement
from outrider.drafters.tree.topology import Topology
from outrider.runtime import HFModel, Nodes

Children = Literal["iid", "distinct", "chosen"]


@dataclass(frozen=True)
class Level:
    """One level of a topology, as a forward pass feeds it.

    Attributes:
        width: most children of a node.
        last: nodes of the tree down to and with the children.
        inner_n: the level's nodes that have children.
        number_nk: which random number draws each child.
        slot_C: where each child is among the n times k.
        parent_C: the children's parents.
        on_path_nK: which of the drafted nodes lie on the path to each inner node.
        on_path_nM: which of the fed nodes do, the level's own included.
        depth_M: edges between each fed node and the root, less one.
    """

    width: int
    last: int
    inner_n: Tensor
    number_nk: Tensor
    slot_C: Tensor
    parent_C: Tensor
    on_path_nK: Tensor
    on_path_nM: Tensor
    depth_M: Tensor

    @classmethod
    def of(cls, topology: Topology, depth: int, device: torch.device) -> "Level":
        """The nodes of that depth and their children."""
        tree = topology
        nodes = range(tree.num_nodes)
        inner = [i for i in nodes if tree.depths[i] == depth and tree.num_children[i]]
        children = [i for i in nodes if tree.depths[i] == depth + 1]
        fed = [i for i in nodes if 0 < tree.depths[i] <= depth and tree.num_children[i]]
        width = max(tree.num_children[i] for i in inner)
        first = {tree.parents[c]: c for c in reversed(children)}
        last = children[-1] + 1
        ancestors_NN = torch.tensor(tree.ancestors)

        def tensor(numbers: object) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        return cls(
            width,
            last,
            tensor(inner),
            tensor([[min(first[i] + k, last - 1) - 1 for k in range(width)] for i in inner]),
            tensor([inner.index(tree.parents[c]) * width + tree.ranks[c] for c in children]),
            tensor([tree.parents[c] for c in children]),
            ancestors_NN[inner, 1 : children[0]].to(device),
            ancestors_NN[inner][:, fed].to(device),
            tensor([tree.depths[i] - 1 for i in fed]),
        )


class TreeDrafter(ModelBacked):
    """Drafts a static tree from a draft model, under the same sampling parameters as the target.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        topology: the tree; budgets cut it at their depth.
        children: ``iid`` draws, ``distinct`` draws without replacement, or ``chosen``: the best
            tokens by rank, for which no distributions are computed.

    Raises:
        InvalidParameterError: any other kind of children.

    Attributes:
        runs_trees: whether the draft model's own passes run over trees.
    """

    runs_trees: ClassVar[bool] = True

    def __init__(
        self, model: HFModel, num_tokens: int, topology: Topology, children: Children = "iid"
    ) -> None:
        if children not in get_args(Children):
            raise InvalidParameterError(
                f"children={children!r}: must be one of iid, distinct, chosen"
            )
        super().__init__(model, num_tokens)
        self.topology = topology
        self.drawn: Drawn = children
        self.depth = topology.depth
        self._levels = [Level.of(topology, d, model.device) for d in range(topology.depth)]
        self._parents_N = torch.tensor(topology.parents, device=model.device)

    def max_nodes(self, num_tokens: int) -> int:
        return len(self.topology.parents) + 1

    @property
    def drafts_trees(self) -> bool:
        """Whether the target scores trees."""
        return not self.topology.is_chain

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        levels = self._levels[: budget.max_tokens]
        if not levels:
            return Draft.root_only(context.root_B)
        drawn: Drawn = "chosen" if context.distribution.greedy else self.drawn
        warp = context.distribution.logits if drawn == "chosen" else context.distribution
        u_BD = None if drawn == "chosen" else rng.uniform(Role.DRAFT, levels[-1].last - 1)
        tokens_BN = context.root_B[:, None]
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        distributions = []
        for depth, level in enumerate(levels):
            logits_BnV = self._logits(state, context, tokens_BN, level)
            prefix = _prefix(context, tokens_BN, mask_BN, level)
            q_BnV = warp(fitted(logits_BnV, self.num_tokens), prefix)
            token_Bnk, exists_Bnk = _children(q_BnV, drawn, level, u_BD)
            exists_BC = exists_Bnk.flatten(1)[:, level.slot_C] & mask_BN[:, level.parent_C]
            if budget.tokens_B is not None:
                exists_BC = exists_BC & (budget.tokens_B > depth)[:, None]
            tokens_BN = torch.cat([tokens_BN, token_Bnk.flatten(1)[:, level.slot_C]], 1)
            mask_BN = torch.cat([mask_BN, exists_BC], 1)
            distributions.append(q_BnV)
        N = tokens_BN.shape[1]
        probs_BNV = None if drawn == "chosen" else _by_node(distributions, levels, N)
        if len(levels) == N - 1:
            return Draft.chain(tokens_BN, mask_BN, probs_BNV, drawn)
        parents_BN = self._parents_N[:N].expand_as(tokens_BN)
        max_walk_length = max(self.topology.turns[:N])
        return Draft(
            tokens_BN, parents_BN, mask_BN, probs_BNV, drawn, max_walk_length=max_walk_length
        )

    def _logits(
        self, state: ModelState, context: Context, tokens_BN: Tensor, level: Level
    ) -> Tensor:
        """Logits behind the level's nodes that have children, (B, n, V)."""
        if tokens_BN.shape[1] == 1:
            return self._catch_up(state, context)[:, None]
        B = context.num_rows
        nodes = Nodes(level.on_path_nM.expand(B, -1, -1), level.depth_M.expand(B, -1))
        tokens_Bn = tokens_BN[:, level.inner_n].clamp(max=self.model.num_tokens - 1)
        return self.model.extend(state.cache, tokens_Bn, nodes)


def _prefix(context: Context, tokens_BN: Tensor, mask_BN: Tensor, level: Level) -> Prefix:
    """What precedes the children of the level's nodes, these nodes included."""
    B = context.num_rows
    return Prefix(
        context,
        lambda: tokens_BN[:, 1:],
        lambda: level.on_path_nK.expand(B, -1, -1),
        lambda: mask_BN[:, level.inner_n],
    )


def _children(
    q_BnV: Tensor, drawn: Drawn, level: Level, u_BD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tokens of the children, (B, n, k), and which of them exist."""
    if u_BD is None:
        return best(q_BnV, level.width)
    u_Bnk = u_BD[:, level.number_nk]
    if drawn == "distinct":
        return without_replacement(q_BnV, u_Bnk)
    token_Bnk = independent(q_BnV, u_Bnk)
    return token_Bnk, torch.ones_like(token_Bnk, dtype=torch.bool)


def _by_node(distributions: list[Tensor], levels: list[Level], num_nodes: int) -> Tensor:
    """The distributions by node, (B, N, V); zeros for nodes without children."""
    B, _, V = distributions[0].shape
    probs_BNV = distributions[0].new_zeros(B, num_nodes, V)
    for q_BnV, level in zip(distributions, levels, strict=True):
        probs_BNV.index_copy_(1, level.inner_n, q_BnV)
    return probs_BNV
