"""The candidates of a dynamic tree as one program: a forward pass per level, and the nodes that are
expanded next.

The program runs the loop of ``expand.py`` itself, with forward passes over the expanded nodes under
their tree mask. No Python runs between the levels. Depth and width are part of the program; rows,
query tokens, slots, temperature, truncation and penalties are inputs, as of the fused draft of a
chain (``runtime/executors/fused_draft.py``). Which candidates a draft keeps is decided outside.

Legend: B rows, K query tokens of the first forward pass, n nodes expanded in a level, N expanded
nodes, the root first, and one candidate more, C candidates, S slots, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.drafters.search import beam_tree as tree_module
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.search.fused import BeamDraft
from outrider.drafters.tree import expand as expand_module
from outrider.drafters.tree.expand import Candidates, expand, expanded_nodes
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compile_cache import hash_of_sources
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.sampling.penalties import occurrences


@dataclass(frozen=True)
class DynamicTreePlan:
    """A tree of ``depth`` levels, in each of which ``width`` nodes get as many children (a
    ``DraftPlan``)."""

    depth: int
    width: int
    num_draws: ClassVar[int] = 1  # no program takes none
    draws: ClassVar[bool] = True
    argmax: ClassVar[bool] = True

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        return (self.width,) * (self.depth - 1)

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyDynamicTree(module, spec, self), SampledDynamicTree(module, spec, self)


class ExpandedDraft(BeamDraft):
    """What programs of dynamic trees share.

    Args:
        module, spec: as of ``ChainForward``.
        plan: what is drafted.
    """

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: DynamicTreePlan) -> None:
        super().__init__(module, spec, plan.num_draws)
        self.plan = plan

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plan}, {sources_of_expansion()}"

    @property
    def num_later(self) -> int:
        return sum(self.plan.widths(sampled=True))

    def expanded(
        self, root_B1: Tensor, recorded_after: Callable[[BeamTree], Tensor]
    ) -> tuple[Tensor, ...]:
        """What is recorded of the expanded nodes, (B, N, V), zero for the last node; their tokens,
        and last the first candidate of the last level, (B, N); and ``Candidates``.

        Args:
            root_B1: the last committed token of each row.
            recorded_after: what is recorded of some nodes: :meth:`log_q` is computed from it.
        """
        recorded: list[Tensor] = []

        def log_q(tree: BeamTree, score_Bn: Tensor) -> Tensor:
            recorded.append(recorded_after(tree))
            return self.log_q(recorded[-1])

        depth, width = self.plan.depth, self.plan.width
        found, tree = expand(BeamTree.root(root_B1), depth, width, log_q)
        last = found.token_BC.shape[1] - recorded[-1].shape[1] * width
        tokens_BN = torch.cat([root_B1, tree.tokens_BM, found.token_BC[:, last : last + 1]], 1)
        recorded_BNV = pad(torch.cat(recorded, 1), (0, 0, 0, 1))
        return recorded_BNV, tokens_BN, *found

    def same(self, wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """After equal tokens below the same nodes: two nodes may have one token."""
        depth, width = self.plan.depth, self.plan.width
        one_BM, other_BM = (
            expanded_nodes(Candidates(*each[3:6]).score_BC, depth, width)
            for each in (wanted, found)
        )
        same_BM = (one_BM == other_BM).cumprod(1).bool()
        return super().same(wanted, found) & pad(same_BM, (1, 0), value=True)

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """Whether the expanded nodes are those that follow from what is recorded of them."""

        def recorded(tree: BeamTree) -> Tensor:
            end = tree.tokens_BM.shape[1] + 1
            return rows_BDV[:, end - tree.path_BnK.shape[1] : end]

        _, tokens_BN, *_ = self.expanded(tokens_BD[:, :1], recorded)
        return torch.equal(tokens_BN[:, 1:], tokens_BD)

    def log_q(self, recorded_BnV: Tensor) -> Tensor:
        """The logarithm of the distributions, at most 0, given what is recorded of them."""
        raise NotImplementedError

    def _candidates(
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        rest: tuple[Tensor, list[Tensor], list[Tensor]],
        parameters: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """As :meth:`expanded`, with the sum of the logits' health, (B,), as second result."""
        after, health = self.passes(tokens_BK, length_B, *rest)
        recorded_BNV, *found = self.expanded(
            tokens_BK[:, -1:], lambda tree: self.recorded_of(after(tree), parameters, tree)
        )
        return recorded_BNV, torch.stack(health).sum(0), *found

    def recorded_of(self, z_BnV: Tensor, parameters: Sequence[Tensor], tree: BeamTree) -> Tensor:
        """What is recorded of the nodes that are expanded, given the logits after them."""
        return z_BnV


class GreedyDynamicTree(ExpandedDraft):
    """By the softmax of the logits."""

    kind: ClassVar[str] = "greedy tree"

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Logits (B, N, V), zero for the last node; the sum of their health (B,); the expanded
        nodes' tokens, and one candidate's (B, N); and ``Candidates``."""
        return self._candidates(tokens_BK, length_B, (slot_S, keys, values))

    def log_q(self, recorded_BnV: Tensor) -> Tensor:
        return recorded_BnV.log_softmax(-1).clamp(max=0)


class SampledDynamicTree(ExpandedDraft, SampledDraft):
    """By the distributions under each row's sampling parameters."""

    kind: ClassVar[str] = "sampled tree"

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
        """As :class:`GreedyDynamicTree`, with distributions in place of logits. Nothing is drawn
        with ``u_BR``."""
        return self._candidates(tokens_BK, length_B, (slot_S, keys, values), parameters)

    def recorded_of(self, z_BnV: Tensor, parameters: Sequence[Tensor], tree: BeamTree) -> Tensor:
        drafted_BnV = occurrences(tree.tokens_BM, tree.on_path_BnM, z_BnV.shape[2])
        return self.drawn_from(z_BnV, parameters, drafted_BnV)

    def log_q(self, recorded_BnV: Tensor) -> Tensor:
        return recorded_BnV.log().clamp(max=0)


@cache
def sources_of_expansion() -> str:
    """A hash of the code that candidates are found by, besides methods of modules."""
    return hash_of_sources(expand_module, tree_module)
