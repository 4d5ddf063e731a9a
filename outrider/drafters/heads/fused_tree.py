"""A head's tree of fixed shape as one program: a pass per level, and the children that follow.

The trees of ``tree/fused.py``, drafted by a head as its chains are (``fused_draft.py``): the
program first reads the newest tokens, children are drawn within the draft vocabulary, and all
distributions are widened at once.

Legend: B rows, K tokens to read, N nodes, R drafted nodes (N-1), D draft vocabulary, H width of the
head, F width of the target's hidden states side by side; of a level: n nodes with children, k
children at most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from outrider.core import Drawn
from outrider.core.health import health_of
from outrider.drafters.heads.fused_draft import (
    HeadDraft,
    HeadProgram,
    SampledHeadDraft,
    Slots,
)
from outrider.drafters.heads.newest import at_last
from outrider.drafters.tree.fused import TreePlan, children_follow, sources_of_growth
from outrider.drafters.tree.grow import Level, by_node, children_of, grow_levels
from outrider.runtime.attention_metadata import AttentionSpec, Nodes
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.sampling.penalties import occurrences

NodeLogits = Callable[[Tensor, Tensor, Nodes], Tensor]
"""From the tokens of nodes, their parents, numbered among the root and the nodes given before, both
(B, n), and the nodes as query tokens to the logits after them, (B, n, D)."""


class TreeHeadProgram(HeadProgram, Protocol):
    """A head that drafts trees level by level."""

    def begin_tree(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Tensor, NodeLogits, Tensor]:
        """Reads the newest tokens; returns the logits over the draft vocabulary after the root,
        (B, 1, D), what computes those after nodes, and the head's output for the root, (B, H).
        Arguments as of ``begin_draft``."""


@dataclass(frozen=True)
class HeadTreePlan(TreePlan):
    """A head's tree of fixed shape."""

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyHeadTreeDraft(module, spec, self), SampledHeadTreeDraft(module, spec, self)


class _HeadTreeDraft(HeadDraft):
    """What greedy and sampled trees share.

    Args:
        module: a ``TreeHeadProgram``.
        spec: as of ``ChainForward``.
        plan: what is drafted.
    """

    drawn: Drawn = "chosen"

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: HeadTreePlan) -> None:
        super().__init__(module, spec, plan.num_draws)
        self.plan = plan
        self.levels = plan.levels

    def extra_repr(self) -> str:
        plan = replace(self.plan, drawn=self.drawn)  # only sampled programs draw as planned
        return f"{super().extra_repr()}, {plan}, {sources_of_growth()}"

    @property
    def num_later(self) -> int:
        return sum(self.plan.widths(sampled=True))

    @property
    def num_slots(self) -> int:
        return self.num_later

    def _draws(self, inputs: Sequence[Any]) -> Tensor | None:
        return None

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """As of trees, within the draft vocabulary."""
        tokens_BR = self._head.vocabulary.draft_ids(tokens_BD)
        return children_follow(self.levels, self.drawn, self._draws(inputs), rows_BDV, tokens_BR)

    def _tree(
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        rest: Any,
        parameters: Sequence[Tensor] = (),
        u_BR: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """What is recorded of each node over the draft vocabulary, (B, N, D); the sum of the
        logits' health (B,); the nodes' tokens, and which of them exist, both (B, N); the head's
        output for the root, (B, H)."""
        num_B, hidden_BKF, slot_S, keys, values = rest
        vocabulary, head = self._head.vocabulary, cast(TreeHeadProgram, self._head)
        slots = Slots(length_B, slot_S.shape[0], keys, values)
        first_B1D, after, last_BH = head.begin_tree(self.spec, tokens_BK, hidden_BKF, num_B, slots)
        health: list[Tensor] = []

        def children(
            tokens_BN: Tensor, mask_BN: Tensor, level: Level
        ) -> tuple[Tensor, Tensor, Tensor]:
            z_BnD = first_B1D
            if level.depth > 0:
                B, tokens_Bn = tokens_BN.shape[0], tokens_BN[:, level.inner_n]
                z_BnD = after(tokens_Bn, level.above_n.expand(B, -1), level.nodes(B))
            health.append(health_of(z_BnD))
            z_BnD = z_BnD.to(torch.promote_types(z_BnD.dtype, torch.float32))
            q_BnD = self.recorded_of(z_BnD, parameters, tokens_BN[:, 1:], level)
            token_Bnk, exists_Bnk = children_of(q_BnD, self.drawn, level, u_BR)
            return q_BnD, vocabulary.target_ids_D[token_Bnk], exists_Bnk

        root_B1 = at_last(tokens_BK[..., None], num_B)[..., 0]
        tokens_BN, mask_BN, recorded = grow_levels(root_B1, self.levels, children)
        recorded_BND = by_node(recorded, self.levels, tokens_BN.shape[1])
        return recorded_BND, torch.stack(health).sum(0), tokens_BN, mask_BN, last_BH

    def recorded_of(
        self, z_BnD: Tensor, parameters: Sequence[Tensor], tokens_BK: Tensor, level: Level
    ) -> Tensor:
        """What a level's children are drawn from, given its logits, and the tokens above it."""
        return z_BnD


class GreedyHeadTreeDraft(_HeadTreeDraft):
    """The best tokens by rank."""

    kind: ClassVar[str] = "greedy tree"

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        num_B: Tensor,
        hidden_BKF: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``GreedyTreeDraft``, but the logits are over the draft vocabulary, and a last result
        is the head's output for the root, (B, H). Arguments as of ``GreedyHeadDraft``."""
        return self._tree(tokens_BK, length_B, (num_B, hidden_BKF, slot_S, keys, values))


class SampledHeadTreeDraft(_HeadTreeDraft, SampledHeadDraft):
    """Children drawn under each row's sampling parameters."""

    kind: ClassVar[str] = "sampled tree"

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: HeadTreePlan) -> None:
        super().__init__(module, spec, plan)
        self.drawn = plan.drawn

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        parameters: Sequence[Tensor],
        u_BR: Tensor,
        num_B: Tensor,
        hidden_BKF: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As :class:`GreedyHeadTreeDraft`, with distributions over the target's vocabulary in place
        of logits."""
        rest = num_B, hidden_BKF, slot_S, keys, values
        recorded_BND, *others = self._tree(tokens_BK, length_B, rest, parameters, u_BR)
        return self._head.vocabulary.widened(recorded_BND, outside=0.0), *others

    def recorded_of(
        self, z_BnD: Tensor, parameters: Sequence[Tensor], tokens_BK: Tensor, level: Level
    ) -> Tensor:
        drafted_BK = self._head.vocabulary.draft_ids(tokens_BK)
        on_path_BnK = level.on_path_nK.bool().expand(drafted_BK.shape[0], -1, -1)
        drafted_BnD = occurrences(drafted_BK, on_path_BnK, z_BnD.shape[2])
        return self.drawn_from(z_BnD, parameters, drafted_BnD)

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        rows_BRD = rows_BDV[..., self._head.vocabulary.target_ids_D]
        return super().follows(inputs, rows_BRD, tokens_BD)

    def _draws(self, inputs: Sequence[Any]) -> Tensor | None:
        u_BR: Tensor = inputs[4]
        return u_BR
