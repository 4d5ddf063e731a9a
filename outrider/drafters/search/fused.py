"""A beam search as one program: a forward pass per step, and the choice of the beams that follow.

The program runs the loop of ``steps.py`` itself, with forward passes over the living beams under
their tree mask, and the same draws from the same random numbers. No Python runs between the steps.
The numbers of steps and beams are part of the program; rows, query tokens, slots, temperature,
truncation and penalties are inputs, as of the fused draft of a chain
(``runtime/executors/fused_draft.py``). Greedy rows alone have one beam, the argmax chain, and take
the program of chains. The target's search for a block of tokens (``MjgdDrafter``) has beams at
temperature 0, too.

Legend: B rows, K query tokens of the first forward pass, n beams, γ steps, M drafted nodes (n·γ),
N nodes (M + 1), D drafted nodes on a path (γ), R random numbers, S slots, V vocabulary, i steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.core.chain import cached_arange
from outrider.drafters.search import beam_tree as tree_module
from outrider.drafters.search import steps as steps_module
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.search.steps import (
    Distributions,
    Pick,
    Step,
    keep_best,
    keep_best_of_draws,
    score_dtype,
    search,
)
from outrider.drafters.tree import children as children_module
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compile_cache import hash_of_sources
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import ChainForward
from outrider.sampling.penalties import occurrences
from outrider.sampling.warp import DraftParameters, penalised_logits


@dataclass(frozen=True)
class BeamPlan:
    """A search of γ steps (a ``DraftPlan``).

    Attributes:
        depth: γ.
        beams: n, kept by each step.
        samples: whether a step keeps the best of 2n draws, else the best of all continuations.
    """

    depth: int
    beams: int
    samples: bool
    draws: ClassVar[bool] = True
    argmax: ClassVar[bool] = True

    @property
    def num_draws(self) -> int:
        return self.depth * 2 * self.beams if self.samples else 1  # no program takes none

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        return (self.beams if sampled else 1,) * (self.depth - 1)

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyDraft(module, spec, self.depth), SampledBeams(module, spec, self)

    def picks(self, u_BR: Tensor) -> list[Pick]:
        """One per step, from :attr:`num_draws` numbers in [0, 1)."""
        if not self.samples:
            return [keep_best(self.beams)] * self.depth
        return keep_best_of_draws(self.beams, u_BR.unflatten(1, (self.depth, 2 * self.beams)))

    def steps(
        self,
        q_BNV: Tensor,
        tokens_BN: Tensor,
        path_BMD: Tensor,
        score_BM: Tensor,
        total_BD: Tensor,
    ) -> list[Step]:
        """The steps of a search, from what :class:`SampledBeams` returns."""
        n, found = self.beams, []
        depth_M = cached_arange(score_BM.shape[1], tokens_BN.device) // n
        for i in range(self.depth):
            first, end = n * i, n * (i + 1)
            tree = BeamTree(
                tokens_BN[:, 1 : end + 1], path_BMD[:, first:end, : i + 1], depth_M[:end]
            )
            before = slice(0, 1) if i == 0 else slice(first - n + 1, first + 1)
            found.append(Step(q_BNV[:, before], None, total_BD[:, i], tree, score_BM[:, first:end]))
        return found


@dataclass(frozen=True)
class BlockPlan(BeamPlan):
    """A search of the target itself, whose result is emitted. It scores by logits after bias and
    penalties, of rows at temperature 0 as of others, and no row takes the argmax chain."""

    argmax: ClassVar[bool] = False

    def widths(self, *, sampled: bool) -> tuple[int, ...]:
        return super().widths(sampled=True)

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyDraft(module, spec, self.depth), BestBlock(module, spec, self)


class BeamDraft(GreedyDraft):
    """What programs share whose forward passes run over the newest nodes of a tree."""

    def passes(
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Callable[[BeamTree], Tensor], list[Tensor]]:
        """What computes the logits after the newest nodes, (B, n, V), or after the query tokens
        where there are none yet; and the health of all logits so far, each (B,). The logits are in
        float32 or wider. Arguments as of :meth:`forward`."""
        K, span = tokens_BK.shape[1], slot_S.shape[0]
        health: list[Tensor] = []

        def after(tree: BeamTree) -> Tensor:
            if health:
                num = tree.path_BnK.shape[1]
                metadata = self.spec.metadata(length_B + K, num, span, tree.nodes)
                logits_BnV, health_B, *_ = self.run(tree.last_Bn, metadata, span, keys, values)
            else:
                found = ChainForward.forward(self, tokens_BK, length_B, slot_S, keys, values)
                logits_BnV, health_B = found[0][:, -1:], found[1]
            health.append(health_B)
            return logits_BnV.to(torch.promote_types(logits_BnV.dtype, torch.float32))

        return after, health


class SampledBeams(BeamDraft, SampledDraft):
    """A search under each row's sampling parameters.

    Args:
        module, spec: as of ``ChainForward``.
        plan: the search.
    """

    kind: ClassVar[str] = "beams"

    def __init__(self, module: nn.Module, spec: AttentionSpec, plan: BeamPlan) -> None:
        super().__init__(module, spec, plan.num_draws)
        self.plan = plan

    @property
    def num_later(self) -> int:
        return sum(self.plan.widths(sampled=True))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.plan}, {_sources()}"

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
        """The distributions after each node (B, N, V), zero after the last step's; the sum of the
        logits' health (B,); the nodes' tokens, the root first (B, N); the path to each drafted
        node, numbered from 0, and beyond its end -1 (B, M, D); the log-likelihoods of these paths
        (B, M); and of the beams before each step together (B, D)."""
        after, health = self.passes(tokens_BK, length_B, slot_S, keys, values)

        def distributions(tree: BeamTree, score_Bn: Tensor) -> tuple[Tensor, None]:
            drafted_BnV = occurrences(tree.tokens_BM, tree.on_path_BnM, self.num_tokens)
            return self.drawn_from(after(tree), parameters, drafted_BnV), None

        steps = self._search(tokens_BK, u_BR, distributions)
        last = steps[-1]
        none_BnV = last.q_BnV.new_zeros(last.q_BnV.shape[0], self.plan.beams, self.num_tokens)
        paths = [step.tree.path_BnK for step in steps]
        D = self.plan.depth
        return (
            torch.cat([*(step.q_BnV for step in steps), none_BnV], 1),
            torch.stack(health).sum(0),
            torch.cat([tokens_BK[:, -1:], last.tree.tokens_BM], 1),
            torch.cat([pad(each, (0, D - each.shape[2]), value=-1) for each in paths], 1),
            torch.cat([step.score_Bn for step in steps], 1),
            torch.stack([step.total_B for step in steps], 1),
        )

    def same(self, wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Tensor:
        """After equal tokens at the ends of equal paths: two beams may end with one token."""
        same_BM = (wanted[3] == found[3]).all(2)
        return super().same(wanted, found) & pad(same_BM[:, :-1], (1, 0), value=True)

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        """Whether the beams are those that follow from the recorded distributions."""

        def recorded(tree: BeamTree, score_Bn: Tensor) -> tuple[Tensor, None]:
            num, end = tree.path_BnK.shape[1], tree.tokens_BM.shape[1] + 1
            return rows_BDV[:, end - num : end], None

        u_BR = inputs[4].to(rows_BDV.device)
        steps = self._search(tokens_BD, u_BR, recorded)
        return torch.equal(steps[-1].tree.tokens_BM, tokens_BD)

    def _search(self, tokens_BT: Tensor, u_BR: Tensor, distributions: Distributions) -> list[Step]:
        picks = self.plan.picks(u_BR)
        dtype = score_dtype(tokens_BT.device)
        return list(search(BeamTree.root(tokens_BT), picks, distributions, dtype))


class BestBlock(SampledBeams):
    """A search that scores by the softmax of the logits, after bias and penalties."""

    kind: ClassVar[str] = "block"

    def drawn_from(
        self, z_BnV: Tensor, parameters: Sequence[Tensor], drafted_BnV: Tensor
    ) -> Tensor:
        return penalised_logits(z_BnV, DraftParameters(*parameters), drafted_BnV).softmax(-1)


@cache
def _sources() -> str:
    """A hash of the code that beams are searched by, besides methods of modules."""
    return hash_of_sources(tree_module, steps_module, children_module)
