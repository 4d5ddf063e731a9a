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
forgotten after the round, and a budget bounds the depth.

Legend: B rows, N nodes (node 0 is the root), V vocabulary; n nodes expanded in a level, k children
of each, E = nk candidates of a level, M nodes in the draft model's cache, C candidates of all
levels, R nodes kept (N-1).
"""

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Prefix, Stream
from outrider.core.capabilities import TreeShape
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.model import ModelBacked, ModelState, fitted
from outrider.drafters.tree.topology import MAX_DEPTH, MAX_DRAFTED
from outrider.runtime import HFModel, Nodes


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
        )

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        depth = min(self.depth, budget.max_tokens)
        if depth == 0:
            return Draft.root_only(context.root_B)
        token_BC, parent_BC, score_BC, depth_C = self._grow(state, context, depth)
        if budget.tokens_B is not None:
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

    def _grow(
        self, state: ModelState, context: Context, depth: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All candidates in breadth-first order: tokens, parents, log P and depths.

        Parents are numbered like the candidates, from 1 on; 0 is the root.
        """
        B, k, device = context.num_rows, self.width, context.device
        node_Bn = torch.zeros(B, 1, dtype=torch.int64, device=device)
        score_Bn: Tensor = torch.zeros(B, 1, device=device)
        cached_BM = context.tokens_BT[:, :0]
        on_path_BnM = torch.zeros(B, 1, 0, dtype=torch.bool, device=device)
        tokens, parents, scores = [], [], []
        for level in range(depth):
            if level == 0:
                logits_BnV = self._catch_up(state, context)[:, None]
            else:
                depth_M = torch.arange(level, device=device).repeat_interleave(k)
                token_Bn = cached_BM[:, -k:].clamp(max=self.model.num_tokens - 1)
                nodes = Nodes(on_path_BnM, depth_M.expand(B, -1))
                logits_BnV = self.model.extend(state.cache, token_Bn, nodes)
            logits_BnV = fitted(logits_BnV, self.num_tokens)
            prefix = _prefix(context, cached_BM, on_path_BnM, score_Bn)
            log_q_Bnk, token_Bnk = _log_distribution(logits_BnV, prefix).topk(k)
            score_BE = (score_Bn[..., None] + log_q_Bnk).flatten(1)
            tokens.append(token_Bnk.flatten(1))
            parents.append(node_Bn.repeat_interleave(k, 1))
            scores.append(score_BE)
            if level + 1 == depth:
                break

            growing_BE = _growing(context, score_BE, tokens[-1])
            score_Bn, index_Bn = (x[:, :k] for x in _sorted(growing_BE))
            node_Bn = index_Bn + 1 + sum(x.shape[1] for x in tokens[:-1])
            cached_BM = torch.cat([cached_BM, tokens[-1].gather(1, index_Bn)], 1)
            above_BnM = on_path_BnM.gather(
                1, (index_Bn // k)[..., None].expand(-1, -1, on_path_BnM.shape[2])
            )
            self_nn = torch.eye(k, dtype=torch.bool, device=device)
            on_path_BnM = torch.cat([above_BnM, self_nn.expand(B, -1, -1)], 2)
        levels = [torch.full_like(x[0], i + 1) for i, x in enumerate(tokens)]
        return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), torch.cat(levels)


def _most_probable(score_BC: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The kept candidates, (B, R), in the order of all candidates, and which of them exist."""
    C = score_BC.shape[1]
    score_BR, kept_BR = (x[:, :num_nodes] for x in _sorted(score_BC))
    kept_BR = torch.where(score_BR > -torch.inf, kept_BR, C).sort(1).values
    return kept_BR.clamp(max=C - 1), kept_BR < C


def _renumbered(parent_BC: Tensor, kept_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Parents of the kept candidates, numbered as nodes of the draft; 0 where none exists."""
    B, R = kept_BR.shape
    number_BC1 = parent_BC.new_zeros(B, parent_BC.shape[1] + 1)
    node_BR = torch.arange(1, R + 1, device=kept_BR.device) * mask_BR
    number_BC1.scatter_reduce_(1, kept_BR + 1, node_BR, "amax")
    return number_BC1.gather(1, parent_BC.gather(1, kept_BR)) * mask_BR


def _sorted(score_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in descending order, and their indices; the first of equals comes first."""
    ordered = score_BC.sort(dim=1, descending=True, stable=True)
    return ordered.values, ordered.indices


def _log_distribution(logits_BnV: Tensor, prefix: Prefix) -> Tensor:
    """log q, clamped to at most 0, so that no child outranks its parent."""
    distribution = prefix.context.distribution
    if distribution.greedy:
        return distribution.logits(logits_BnV, prefix).log_softmax(-1).clamp(max=0)
    return distribution(logits_BnV, prefix).log().clamp(max=0)


def _growing(context: Context, score_BE: Tensor, token_BE: Tensor) -> Tensor:
    """The scores by which nodes are expanded: end tokens are not."""
    if context.ends is None:
        return score_BE
    return score_BE.masked_fill(context.ends.are_ends(token_BE), -torch.inf)


def _prefix(context: Context, cached_BM: Tensor, on_path_BnM: Tensor, score_Bn: Tensor) -> Prefix:
    """What precedes the expanded nodes: nodes in the cache. A node of score -inf does not exist."""
    return Prefix(context, lambda: cached_BM, lambda: on_path_BnM, lambda: score_Bn > -torch.inf)


def _check(name: str, value: int, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidParameterError(
            f"{name}={value!r}: must be a whole number from {least} to {most}"
        )
