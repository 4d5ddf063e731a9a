"""The overlap Σ_x min(p, q) of target and draft distribution, estimated from the drafted tokens.

Along the draft x_1 … x_n, with x_i drawn from q_i and verified against p_i,

    r_i = min(1, p_i(x_i) / q_i(x_i)),   w_i = r_1 … r_{i-1}

r_i is an unbiased estimate of Σ_x min(p_i, q_i), and w_i is the probability that token-level
rejection sampling accepts all tokens before position i. ``engine/round_counts.py`` says what the
statistics make of the two.

    a chosen token has the point mass as its q: r_i = p_i(x_i), which is Σ_x min(p, q)
    a search (beams) does not draw from q: Σ_x min(p, q) itself replaces r_i in the sum
    of a tree, x_1 … x_n are the first children from the root down, which are draws as in a chain

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core.draft import Draft, Verdict
from outrider.core.loop_operator import LoopState
from outrider.core.protocols import NodeDistributions
from outrider.core.reductions import any_of
from outrider.core.repeat import repeat_while
from outrider.core.round import Overlap
from outrider.core.walk import at_node


def estimated_overlap(draft: Draft, p_BNV: Tensor) -> Overlap:
    """The overlap of a draft of two nodes or more with the target's distributions.

    min(1, p(x)/q(x)) costs two gathers where the sum over the vocabulary would read both
    distributions in full. Fused verification compiles this function.
    """
    ratio_BD = _at_tokens(draft, p_BNV)
    if draft.drawn_probs_BN is not None:
        ratio_BD = ratio_BD / draft.drawn_probs_BN[:, 1:]
    elif draft.probs_BNV is not None:
        ratio_BD = ratio_BD / _at_tokens(draft, draft.probs_BNV)
    ratio_BD = ratio_BD.clamp(max=1)
    if draft.drawn != "searched" or draft.probs_BNV is None:
        return overlap_by_depth(draft, ratio_BD)
    common_BN = torch.minimum(p_BNV, draft.probs_BNV).sum(-1)
    return overlap_by_depth(draft, ratio_BD, common_BN.gather(1, draft.parents_BN[:, 1:]))


def overlap_by_depth(draft: Draft, ratio_BD: Tensor, estimate_BD: Tensor | None = None) -> Overlap:
    """The overlap at each depth of a draft.

    Args:
        draft: the draft.
        ratio_BD: r of each drafted node.
        estimate_BD: the estimate of Σ_x min(p, q) at each drafted node, where it is not r.
    """
    if not draft.is_full:
        ratio_BD = torch.where(draft.mask_BN[:, 1:], ratio_BD, 0.0)
    if draft.is_chain:
        product_BN = pad(ratio_BD, (1, 0), value=1.0).cumprod(1)
        reached_BD, product_BD = product_BN[:, :-1], product_BN[:, 1:]
    else:
        above_BNN = draft.ancestors_BNN.tril(-1)[:, 1:, 1:]
        reached_BD = torch.where(above_BNN, ratio_BD[:, None], 1.0).prod(2)
        product_BD = reached_BD * ratio_BD
    if not draft.is_full:
        reached_BD = torch.where(_on_first_path(draft)[:, 1:], reached_BD, 0.0)
    overlap_BD = product_BD if estimate_BD is None else reached_BD * estimate_BD
    if not draft.is_full:  # nodes that do not exist may hold anything
        overlap_BD = torch.where(reached_BD > 0, overlap_BD, 0.0)
    if draft.is_chain:
        return Overlap(reached_BD, overlap_BD)
    depth_BD = (draft.depth_BN[:, 1:] - 1).clamp(min=0)
    zeros_BD = torch.zeros_like(reached_BD)
    return Overlap(
        zeros_BD.scatter_add(1, depth_BD, reached_BD),
        zeros_BD.scatter_add(1, depth_BD, overlap_BD),
    )


def overlap_down(draft: Draft, p_at: NodeDistributions) -> Overlap:
    """As :func:`estimated_overlap`, of trees that no search found, node by node down the first
    children: no other distributions are asked for."""
    B, D = draft.tokens_BN.shape[0], draft.num_nodes - 1
    step_D = torch.arange(D, device=draft.tokens_BN.device)
    parents_BN = torch.where(draft.mask_BN, draft.parents_BN, -1)

    def first_child(node_B: Tensor) -> tuple[Tensor, Tensor]:
        is_child_BN = parents_BN == node_B[:, None]
        return any_of(is_child_BN), is_child_BN.int().argmax(1)

    def some_row_goes_on(_: Tensor, reached_B: Tensor, *__: Tensor) -> Tensor:
        return any_of(reached_B > 0)

    def descend(
        node_B: Tensor, reached_B: Tensor, step: Tensor, reached_BD: Tensor, overlap_BD: Tensor
    ) -> LoopState:
        _, child_B = first_child(node_B)
        x_B1 = draft.tokens_BN.gather(1, child_B[:, None])
        ratio_B = p_at(node_B).gather(1, x_B1)[:, 0]
        if draft.drawn_probs_BN is not None:
            ratio_B = ratio_B / draft.drawn_probs_BN.gather(1, child_B[:, None])[:, 0]
        elif draft.probs_BNV is not None:
            ratio_B = ratio_B / at_node(draft.probs_BNV, node_B).gather(1, x_B1)[:, 0]
        here_BD = (step_D == step) & (reached_B > 0)[:, None]
        overlap_B = reached_B * ratio_B.clamp(max=1).to(reached_B.dtype)
        reached_BD = torch.where(here_BD, reached_B[:, None], reached_BD)
        overlap_BD = torch.where(here_BD, overlap_B[:, None], overlap_BD)
        has_child_B, _ = first_child(child_B)
        goes_on_B = (reached_B > 0) & has_child_B
        return child_B, torch.where(goes_on_B, overlap_B, 0.0), step + 1, reached_BD, overlap_BD

    root_B = torch.zeros(B, dtype=torch.int64, device=draft.tokens_BN.device)
    has_child_B, _ = first_child(root_B)
    none_BD = torch.zeros(B, D, device=draft.tokens_BN.device)
    state = root_B, has_child_B.float(), root_B.new_zeros(()), none_BD, none_BD.clone()
    # Each step descends by a level, of which there are at most D.
    return Overlap(*repeat_while(some_row_goes_on, descend, state, at_most=D)[3:])


def accepted_nodes(draft: Draft, verdict: Verdict) -> Tensor:
    """1 for drafted nodes on the accepted path, else 0, (B, D): r of each where a lossless rule
    verified by the argmax."""
    step_D = torch.arange(verdict.path_BD.shape[1], device=verdict.path_BD.device)
    on_path_BD = (step_D < verdict.num_accepted_B[:, None]).float()
    accepted_BN = torch.zeros(draft.tokens_BN.shape, device=on_path_BD.device)
    return accepted_BN.scatter_reduce(1, verdict.path_BD, on_path_BD, "amax")[:, 1:]


def _on_first_path(draft: Draft) -> Tensor:
    """Which nodes are on the path of first children from the root down, (B, N)."""
    if draft.is_chain:
        return draft.mask_BN
    siblings_BNN = draft.parents_BN[:, :, None] == draft.parents_BN[:, None]
    later_BN = any_of((siblings_BNN & draft.mask_BN[:, None]).tril(-1))
    return draft.mask_BN & ~any_of(draft.ancestors_BNN & later_BN[:, None])


def _at_tokens(draft: Draft, probs_BNV: Tensor) -> Tensor:
    """The probability of each drafted node's token under its parent's distribution, (B, D)."""
    if draft.is_chain:
        return probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
    V = probs_BNV.shape[2]
    index_BD = draft.parents_BN[:, 1:].clamp(min=0) * V + draft.tokens_BN[:, 1:]
    return probs_BNV.flatten(1).gather(1, index_BD)
