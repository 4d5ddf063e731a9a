"""A draft model grows a tree of its most probable paths, shaped anew in every round.

Li, Wei, Zhang and Zhang, "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
EMNLP 2024, sections 4.1 and 4.2.

    value of a node v   P(v) = product of q along the path to v, an estimate of its acceptance
    expand, per level   the ``width`` nodes of largest P get their ``width`` best tokens as children
    keep, in the end    the ``num_nodes`` nodes of largest P

A child's value is at most its parent's, and of equal values the upper node is kept, so the kept
nodes form a tree. Here q is the distribution that is sampled from, temperature and truncation
included, where EAGLE-2 takes the draft model's raw softmax. If all rows are at temperature 0, q is
the raw softmax here too, since the sampled distribution has one token only. (A row at temperature 0
among rows that sample gets a chain.)

The nodes are *chosen*: whether a node is kept depends on the probabilities of all others, so the
nodes are not a fair sample of q, and a rule for draws would be biased.

Forward passes, cache and budgets are as in ``TreeDrafter``: one pass per level, all nodes are
forgotten after the round, and a budget bounds the depth. Levels grow by ``expand.py``; where the
model is compiled, all of them are one program (``fused_dynamic.py``), unless there are processors
or forced tokens, or the tokens of greedy rows are to be those of changed logits.

Legend: B rows, N nodes (node 0 is the root), V vocabulary; n nodes expanded in a level,
C candidates of all levels, R nodes kept (N-1).
"""

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Prefix, Stream
from outrider.core.capabilities import TreeShape
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.model import ModelBacked, ModelState, fitted
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.tree.expand import Candidates, by_score, depths, expand
from outrider.drafters.tree.fused_dynamic import DynamicTreePlan
from outrider.drafters.tree.topology import MAX_DEPTH, MAX_DRAFTED
from outrider.runtime import HFModel
from outrider.sampling import Warp


class DynamicTreeDrafter(ModelBacked):
    """Drafts a draft model's tree of most probable nodes.

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        num_nodes: nodes of the tree, root included, 2 to 256.
        width: nodes expanded per level, and children of each, at least 1.
        depth: levels, at most 64; budgets cut them. At most 255 nodes are expanded in all.

    Raises:
        InvalidParameterError: a number outside its range.
    """

    drawn: Drawn = "chosen"

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        num_nodes: int = 60,
        width: int = 10,
        depth: int = 6,
    ) -> None:
        _check("num_nodes", num_nodes, 2, MAX_DRAFTED + 1)
        _check("depth", depth, 1, MAX_DEPTH)
        _check("width", width, 1, MAX_DRAFTED // max(depth - 1, 1))
        super().__init__(model, num_tokens)
        self.num_nodes = num_nodes
        self.width = min(width, num_tokens)
        self.depth = depth
        self._plan = self._plan_of(depth, self.width)

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        num_candidates = self.width + (self.depth - 1) * self.width**2
        num_nodes = 1 + min(self.num_nodes - 1, num_candidates)
        shape = TreeShape(num_nodes, self._walk_length(self.depth, num_nodes))
        return replace(
            super().capabilities,
            depth=self.depth,
            max_nodes=lambda num_tokens: max(self.num_nodes, self.width * self.depth) + 1,
            drafts_trees=True,
            tree_shape=None if self.width == 1 else shape,
            runs_trees=True,
            fused_tree=self._plan,
        )

    def _plan_of(self, depth: int, width: int) -> DynamicTreePlan | None:
        """What the compiled program grows; None if there is none."""
        fits = self.model.num_tokens == self.num_tokens
        return DynamicTreePlan(depth, width) if fits else None

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        depth = min(self.depth, budget.max_tokens)
        if depth == 0:
            return Draft.root_only(context.root_B)
        found = self._by_program(state, context, depth, rng)
        token_BC, parent_BC, score_BC = found or self._by_levels(state, context, depth)
        if budget.tokens_B is not None:
            depth_C = self._depth_C[: score_BC.shape[1]]
            score_BC = score_BC.masked_fill(depth_C > budget.tokens_B[:, None], -torch.inf)
        kept_BR, mask_BR = _most_probable(score_BC, self.num_nodes - 1)
        root_B1 = context.root_B[:, None]
        tokens_BN = torch.cat([root_B1, token_BC.gather(1, kept_BR)], 1)
        mask_BN = torch.cat([torch.ones_like(root_B1, dtype=torch.bool), mask_BR], 1)
        if self.width == 1:
            return Draft.chain(tokens_BN, mask_BN, None, "chosen")
        parents_BR = _renumbered(parent_BC, kept_BR, mask_BR)
        parents_BN = torch.cat([torch.full_like(root_B1, -1), parents_BR], 1)
        max_walk_length = self._walk_length(depth, tokens_BN.shape[1])
        return Draft(
            tokens_BN, parents_BN, mask_BN, None, "chosen", max_walk_length=max_walk_length
        )

    def _walk_length(self, depth: int, num_nodes: int) -> int:
        """``Draft.max_walk_length``: at most ``width`` siblings per level."""
        return min(depth * self.width, num_nodes - 1)

    @cached_property
    def _depth_C(self) -> Tensor:
        """The depth of each candidate of all levels."""
        return torch.tensor(depths(self.depth, self.width), device=self.model.device)

    def _by_program(
        self, state: ModelState, context: Context, depth: int, rng: Stream
    ) -> Candidates | None:
        """The candidates by one program; None if there is none for them."""
        distribution, plan = context.distribution, self._plan
        if plan is None or depth < self.depth or not isinstance(distribution, Warp):
            return None
        fuses = distribution.keeps_logits if distribution.greedy else distribution.fuses
        if not (self._has_programs and fuses and self._can_align(state, context)):
            return None
        sampled = not distribution.greedy
        done = self._draft_by(plan, state, context, rng, sampled=sampled)
        return None if done is None else Candidates(*done[2:])

    def _by_levels(self, state: ModelState, context: Context, depth: int) -> Candidates:
        """The candidates of so many levels, one forward pass per level."""

        def log_q(tree: BeamTree, score_Bn: Tensor) -> Tensor:
            if tree.tokens_BM.shape[1]:
                tokens_Bn = tree.last_Bn.clamp(max=self.model.num_tokens - 1)
                logits_BnV = self.model.extend(state.cache, tokens_Bn, tree.nodes)
            else:
                logits_BnV = self._catch_up(state, context)[:, None]
            logits_BnV = fitted(logits_BnV, self.num_tokens)
            return _log_distribution(logits_BnV, tree.prefix(context, score_Bn))

        found, _ = expand(BeamTree.root(context.tokens_BT), depth, self.width, log_q)
        return found


def _most_probable(score_BC: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The kept candidates, (B, R), in the order of all candidates, and which of them exist."""
    C = score_BC.shape[1]
    score_BR, kept_BR = (x_BC[:, :num_nodes] for x_BC in by_score(score_BC))
    kept_BR = torch.where(score_BR > -torch.inf, kept_BR, C).sort(1).values
    return kept_BR.clamp(max=C - 1), kept_BR < C


def _renumbered(parent_BC: Tensor, kept_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Parents of the kept candidates, numbered as nodes of the draft; 0 where none exists."""
    B, R = kept_BR.shape
    number_BC1 = parent_BC.new_zeros(B, parent_BC.shape[1] + 1)
    node_BR = torch.arange(1, R + 1, device=kept_BR.device) * mask_BR
    number_BC1.scatter_reduce_(1, kept_BR + 1, node_BR, "amax")
    return number_BC1.gather(1, parent_BC.gather(1, kept_BR)) * mask_BR


def _log_distribution(logits_BnV: Tensor, prefix: Prefix) -> Tensor:
    """log q, clamped to at most 0, so that no child outranks its parent."""
    distribution = prefix.context.distribution
    if distribution.greedy:
        return distribution.logits(logits_BnV, prefix).log_softmax(-1).clamp(max=0)
    return distribution(logits_BnV, prefix).log().clamp(max=0)


def _check(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidParameterError(
            f"{name}={value!r}: must be a whole number from {least} to {most}"
        )
