"""A tree of fixed shape as one program: a forward pass per level, and the children that follow.

The program runs the loop of ``grow.py`` itself (:func:`~outrider.drafters.tree.grow.grow_levels`),
with forward passes over the levels' nodes under their tree mask, and the same draws from the same
random numbers. No Python runs between the levels. The shape is part of the program; rows, query
tokens, slots, temperature and truncation are inputs, as of the fused draft of a chain
(``runtime/executors/fused_draft.py``).

Legend: B rows, K query tokens of the first forward pass, N nodes, R drafted nodes (N-1), S slots,
V vocabulary; of a level: n nodes with children, k children at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.core import Drawn
from outrider.drafters.tree import children as children_module
from outrider.drafters.tree import grow as grow_module
from outrider.drafters.tree.grow import Level, StaticTree, by_node, children_of, grow_levels
from outrider.drafters.tree.topology import Topology
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compile_cache import hash_of_sources
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import ChainForward
from outrider.sampling.penalties import occurrences


@dataclass(frozen=True)
class TreePlan:
    """A tree of fixed shape (a ``DraftPlan``).

    Attributes:
        topology: the shape.
        drawn: how siblings are obtained where rows are sampled.
        device: of the batches.
    """

    topology: Topology
    drawn: Drawn
    device: torch.device
    argmax: ClassVar[bool] = True

    @property
    def num_draws(self) -> int:
        return self.topology.num_nodes - 1

    @property
    def draws(self) -> bool:
        return self.drawn != "chosen"

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        tree = self.topology
        inner = [d for d, num in zip(tree.depths, tree.num_children, strict=True) if num]
        return tuple(inner.count(depth) for depth in range(1, tree.depth))

    @property
    def levels(self) -> list[Level]:
        """The levels of the shape, from the root down."""
        return [Level.of(self.topology, depth, self.device) for depth in range(self.topology.depth)]

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyTreeDraft(module, spec, self), SampledTreeDraft(module, spec, self)


class _TreeDraft(GreedyDraft):
    """What greedy and sampled trees share.

    Args:
        module, spec: as of ``ChainForward``.
        plan: what is drafted.
    """

    drawn: Drawn = "chosen"

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: TreePlan) -> None:
        super().__init__(module, spec, plan.num_draws)
        self.plan = plan
        self.levels = plan.levels

    def extra_repr(self) -> str:
        plan = replace(self.plan, drawn=self.drawn)  # only sampled programs draw as planned
        return f"{super().extra_repr()}, {plan}, {sources_of_growth()}"

    @property
    def num_later(self) -> int:
        return sum(self.plan.widths(sampled=True))

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        return children_follow(self.levels, self.drawn, self._draws(inputs), rows_BDV, tokens_BD)

    def _draws(self, inputs: Sequence[Any]) -> Tensor | None:
        return None

    def _tree(
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        rest: tuple[Tensor, list[Tensor], list[Tensor]],
        parameters: Sequence[Tensor] = (),
        u_BR: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """What is recorded of each node, the health, and tokens and mask of the nodes."""
        slot_S, keys, values = rest
        B, K = tokens_BK.shape
        health: list[Tensor] = []

        def logits(tokens_BN: Tensor, level: Level) -> Tensor:
            if level.depth == 0:
                found = ChainForward.forward(self, tokens_BK, length_B, slot_S, keys, values)
                logits_BnV, health_B = found[0][:, -1:], found[1]
            else:
                inner_n, span = level.inner_n, slot_S.shape[0]
                metadata = self.spec.metadata(length_B + K, len(inner_n), span, level.nodes(B))
                logits_BnV, health_B, *_ = self.run(
                    tokens_BN[:, inner_n], metadata, span, keys, values
                )
            health.append(health_B)
            return logits_BnV.to(torch.promote_types(logits_BnV.dtype, torch.float32))

        def children(
            tokens_BN: Tensor, mask_BN: Tensor, level: Level
        ) -> tuple[Tensor, Tensor, Tensor]:
            z_BnV = logits(tokens_BN, level)
            q_BnV = z_BnV
            if u_BR is not None:
                on_path_BnK = level.on_path_nK.bool().expand(B, -1, -1)
                q_BnV = self.recorded_of(z_BnV, parameters, tokens_BN[:, 1:], on_path_BnK)
            return q_BnV, *children_of(q_BnV, self.drawn, level, u_BR)

        tokens_BN, mask_BN, recorded = grow_levels(tokens_BK[:, -1:], self.levels, children)
        recorded_BNV = by_node(recorded, self.levels, tokens_BN.shape[1])
        return recorded_BNV, torch.stack(health).sum(0), tokens_BN, mask_BN

    def recorded_of(
        self,
        z_BnV: Tensor,
        parameters: Sequence[Tensor],
        tokens_BK: Tensor,
        on_path_BnK: Tensor,
    ) -> Tensor:
        """What children are drawn from, given the logits of a level, and the tokens above it."""
        return z_BnV


class GreedyTreeDraft(_TreeDraft):
    """The best tokens by rank."""

    kind: ClassVar[str] = "greedy tree"

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Logits (B, N, V), zero for nodes without children; the sum of their health (B,); the
        nodes' tokens, and which of them exist, both (B, N)."""
        return self._tree(tokens_BK, length_B, (slot_S, keys, values))


class SampledTreeDraft(_TreeDraft, SampledDraft):
    """Children drawn under each row's sampling parameters."""

    kind: ClassVar[str] = "sampled tree"

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: TreePlan) -> None:
        super().__init__(module, spec, plan)
        self.drawn = plan.drawn

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        parameters: Sequence[Tensor],
        u_BR: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As :class:`GreedyTreeDraft`, with distributions in place of logits."""
        return self._tree(tokens_BK, length_B, (slot_S, keys, values), parameters, u_BR)

    def recorded_of(
        self,
        z_BnV: Tensor,
        parameters: Sequence[Tensor],
        tokens_BK: Tensor,
        on_path_BnK: Tensor,
    ) -> Tensor:
        drafted_BnV = occurrences(tokens_BK, on_path_BnK, self.num_tokens)
        return self.drawn_from(z_BnV, parameters, drafted_BnV)

    def _draws(self, inputs: Sequence[Any]) -> Tensor | None:
        u_BR: Tensor = inputs[4]
        return u_BR


def children_follow(
    levels: Sequence[Level],
    drawn: Drawn,
    u_BR: Tensor | None,
    rows_BRV: Tensor,
    tokens_BR: Tensor,
) -> bool:
    """Whether the children of each node are those that follow from what is recorded of it.

    Args:
        levels: of the tree.
        drawn: how siblings are obtained.
        u_BR: the numbers they are drawn with; None where the best tokens by rank are taken.
        rows_BRV: what is recorded of each node but the last.
        tokens_BR: the drafted tokens.
    """
    tokens_BN = nn.functional.pad(tokens_BR, (1, 0))
    for level in levels:
        found = children_of(rows_BRV[:, level.inner_n], drawn, level, u_BR)
        token_BC, exists_BC = (each_Bnk.flatten(1)[:, level.slot_C] for each_Bnk in found)
        found_BC = tokens_BN[:, level.num_nodes - len(level.slot_C) : level.num_nodes]
        if not torch.equal(found_BC[exists_BC], token_BC[exists_BC]):
            return False
    return True


def tree_plan(tree: StaticTree) -> TreePlan:
    """The plan of a tree on the device of its levels."""
    return TreePlan(tree.topology, tree.drawn, tree.levels[0].inner_n.device)


@cache
def sources_of_growth() -> str:
    """A hash of the code that trees grow by, besides methods of modules."""
    return hash_of_sources(grow_module, children_module)
