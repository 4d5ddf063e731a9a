"""The candidates of a head's dynamic tree as one program: a pass per level, and the nodes that are
expanded next.

The candidates of ``tree/fused_dynamic.py``, drafted by a head as its trees of fixed shape are
(``fused_tree.py``): the program first reads the newest tokens, and finds the best tokens within the
draft vocabulary.

Legend: B rows, K tokens to read, n nodes expanded in a level, N expanded nodes, the root first, and
one candidate more, D draft vocabulary, H width of the head, F width of the target's hidden states
side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.core.health import health_of
from outrider.drafters.heads.fused_draft import HeadDraft, SampledHeadDraft, Slots
from outrider.drafters.heads.fused_tree import TreeHeadProgram
from outrider.drafters.heads.newest import at_last
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.tree.fused_dynamic import (
    DynamicTreePlan,
    ExpandedDraft,
    GreedyDynamicTree,
    SampledDynamicTree,
)
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft


@dataclass(frozen=True)
class HeadDynamicTreePlan(DynamicTreePlan):
    """A head's dynamic tree."""

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyHeadDynamicTree(module, spec, self), SampledHeadDynamicTree(module, spec, self)


class ExpandedHeadDraft(HeadDraft, ExpandedDraft):
    """What greedy and sampled trees share."""

    @property
    def num_slots(self) -> int:
        return self.num_later

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """As of dynamic trees, within the draft vocabulary."""
        tokens_BN = self._head.vocabulary.draft_ids(tokens_BD)
        return ExpandedDraft.follows(self, inputs, rows_BDV, tokens_BN)

    def _head_candidates(
        self, tokens_BK: Tensor, length_B: Tensor, rest: Any, parameters: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """What is recorded of the expanded nodes over the draft vocabulary, (B, N, D), zero for the
        last one; the sum of the logits' health (B,); the nodes' tokens (B, N); ``Candidates``; the
        head's output for the root, (B, H)."""
        num_B, hidden_BKF, slot_S, keys, values = rest
        target_ids_D = self._head.vocabulary.target_ids_D
        head = cast(TreeHeadProgram, self._head)
        slots = Slots(length_B, slot_S.shape[0], keys, values)
        first_B1D, after, last_BH = head.begin_tree(self.spec, tokens_BK, hidden_BKF, num_B, slots)
        health: list[Tensor] = []

        def recorded_after(tree: BeamTree) -> Tensor:
            z_BnD = first_B1D
            if health:
                z_BnD = after(target_ids_D[tree.last_Bn], tree.above_Bn, tree.nodes)
            health.append(health_of(z_BnD))
            z_BnD = z_BnD.to(torch.promote_types(z_BnD.dtype, torch.float32))
            return self.recorded_of(z_BnD, parameters, tree)

        root_B1 = at_last(tokens_BK[..., None], num_B)[..., 0]
        recorded_BND, tokens_BN, token_BC, *others = self.expanded(root_B1, recorded_after)
        tokens_BN = torch.cat([root_B1, target_ids_D[tokens_BN[:, 1:]]], 1)
        health_B = torch.stack(health).sum(0)
        return recorded_BND, health_B, tokens_BN, target_ids_D[token_BC], *others, last_BH


class GreedyHeadDynamicTree(ExpandedHeadDraft, GreedyDynamicTree):
    """By the softmax of the logits."""

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
        """As ``GreedyDynamicTree``, but the logits are over the draft vocabulary, and a last result
        is the head's output for the root, (B, H). Arguments as of ``GreedyHeadDraft``."""
        return self._head_candidates(tokens_BK, length_B, (num_B, hidden_BKF, slot_S, keys, values))


class SampledHeadDynamicTree(ExpandedHeadDraft, SampledHeadDraft, SampledDynamicTree):
    """By the distributions under each row's sampling parameters."""

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
        """As :class:`GreedyHeadDynamicTree`, with distributions over the draft vocabulary in place
        of logits. Nothing is drawn with ``u_BR``."""
        rest = num_B, hidden_BKF, slot_S, keys, values
        return self._head_candidates(tokens_BK, length_B, rest, parameters)
