"""Traversal verification: verifies a tree from its leaves to its root, for any kind of draws.

Weng, Hu, Chen, Li, Mei, Qiu, Tian and Shi, "Traversal Verification for Speculative Tree Decoding",
NeurIPS 2025 (arXiv 2505.12398), which writes M_b for the target and M_s for the draft. Each node
has a share a (the probability that something in its subtree is accepted), a target distribution p
for the token after it, and a draft distribution q of its next child; the root has a = 1. A node's
children are verified before the node itself. For each child c in draw order:

    a_c = min(1, a p(c) / q(c));   verify the subtree of c with this share
    if nothing in that subtree is accepted:
        r = max(a p - q, 0),   S = Σ r,   a <- S / (S + 1 - a),   p <- r / S
        q <- the distribution of the next child, as after any rejection
    after the last child:   accept the node with probability a and draw the next token from p;
                            else drop the node

Why this is lossless. Call a node correctly verified if, averaged over the draws below it, something
in its subtree is accepted with probability a, and the token after the node then has the
distribution p. A leaf is correctly verified. If its children are, a child drawn as c contributes
q(c) a_c = min(q, a p)(c), so r is what is still missing from a p. Nothing was accepted with
probability 1 - Σ min(q, a p) = 1 - a + S. Given that, the remaining children and the node itself
have to contribute the share S / (S + 1 - a) of the distribution r / S, with the updated q. By
induction, the root is correctly verified with a = 1.

On a chain, the rule is block verification. As there, the shares do not depend on the random
numbers. They are computed up front, for all nodes with the same ``Draft.walk_step_BN`` at once, and
the verdict is the first node of the traversal with u < a. A program, which is for trees of one
shape, computes them node by node instead, so that it never copies the distributions of all nodes to
change those of a few. A likely token can compensate for an
unlikely one before it on the path, and a dropped leaf leaves its ancestors a chance; in both cases
a walk from the root would lose tokens.

Preserves: the target distribution exactly. Accepts trees and chains of i.i.d., distinct (with
Sequoia's cover property, see ``distinct.py``) and chosen drafts. Synchronises with the device once
per round, to read the shape.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary, X all nodes of all rows, Y nodes of
one walk step in all rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import (
    LOSSLESS,
    Bound,
    Draft,
    Drawn,
    Needs,
    NodeDistributions,
    Role,
    Stream,
    Verdict,
    at_node,
    draw,
    path_to,
)
from outrider.core.reductions import any_of
from outrider.verifiers.distinct import Distinct
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Traversal:
    """Leaf-to-root verification of a tree (Weng et al.)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    by_node: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        share_BN, left_BNV = self.shares(draft, p_BNV)
        node_B = self._accepted(draft, share_BN, rng)
        return self._verdict(draft, node_B, at_node(left_BNV, node_B), rng)

    def verify_at(self, draft: Draft, p_at: NodeDistributions, rng: Stream) -> Verdict:
        """As ``ReadsNodes``, for trees of one shape: reads the nodes that have children, and the
        accepted one."""
        share_BN, left = self.shares_by_node(draft, p_at)
        node_B = self._accepted(draft, share_BN, rng)
        probs_BV = p_at(node_B)
        for node, left_BV in left.items():
            probs_BV = torch.where((node_B == node)[:, None], left_BV, probs_BV)
        return self._verdict(draft, node_B, probs_BV, rng)

    def shares(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """a and p of each node after all its children were dropped, (B, N) and (B, N, V).

        A child has a later walk step than its parent and its elder siblings. One loop over the
        steps therefore computes each node's own share before it is needed for the node's children,
        and then applies the effect of the children on it.
        """
        B, N = draft.tokens_BN.shape
        token_X = draft.tokens_BN.flatten()
        row_B1 = torch.arange(0, B * N, N, device=p_BNV.device)[:, None]
        parent_X = (draft.parents_BN + row_B1).flatten()
        probs_XV = p_BNV.flatten(0, 1).clone()
        q_XV = None if draft.probs_BNV is None else draft.probs_BNV.flatten(0, 1)
        share_X = torch.ones(B * N, dtype=_wide(p_BNV), device=p_BNV.device)
        rule = Distinct() if draft.drawn == "distinct" else Rejection()
        if q_XV is not None and draft.drawn == "distinct":
            q_XV = q_XV.clone()
        for child_Y in walk_steps(draft):
            above_Y, x_Y = parent_X[child_Y], token_X[child_Y]
            p_YV, share_Y = probs_XV[above_Y], share_X[above_Y]
            q_YV = None if q_XV is None else q_XV[above_Y]
            dropped = self._dropped(rule, p_YV, q_YV, share_Y, x_Y)
            share_X[child_Y], share_X[above_Y], probs_XV[above_Y], next_q_YV = dropped
            if q_XV is not None and next_q_YV is not None and draft.drawn == "distinct":
                q_XV[above_Y] = next_q_YV
        return share_X.view(B, N), probs_XV.view_as(p_BNV)

    def shares_by_node(
        self, draft: Draft, p_at: NodeDistributions
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """As :meth:`shares`, for trees of one shape: a of each node, (B, N), and p of those that
        have children, (B, V) each; that of the others is the target's."""
        parents = draft.parents
        assert parents is not None
        rule = Distinct() if draft.drawn == "distinct" else Rejection()
        B, device = draft.tokens_BN.shape[0], draft.tokens_BN.device
        p = {node: p_at(torch.full((B,), node, device=device)) for node in set(parents[1:])}
        q = {node: None if draft.probs_BNV is None else draft.probs_BNV[:, node] for node in p}
        one_B = torch.ones(B, dtype=_wide(p[0]), device=device)
        share = [one_B] * len(parents)
        for child, above in enumerate(parents[1:], 1):  # after its parent and its elder siblings
            exists_B, x_B = draft.mask_BN[:, child], draft.tokens_BN[:, child]
            own_B, after_B, left_BV, next_q_BV = self._dropped(
                rule, p[above], q[above], share[above], x_B
            )
            share[child] = torch.where(exists_B, own_B, one_B)
            share[above] = torch.where(exists_B, after_B, share[above])
            p[above] = torch.where(exists_B[:, None], left_BV, p[above])
            q_BV = q[above]
            if q_BV is not None and next_q_BV is not None and draft.drawn == "distinct":
                q[above] = torch.where(exists_B[:, None], next_q_BV, q_BV)
        return torch.stack(share, 1), p

    def _accepted(self, draft: Draft, share_BN: Tensor, rng: Stream) -> Tensor:
        """The accepted node of each row, (B,)."""
        N = draft.num_nodes
        u_BD = rng.uniform(Role.ACCEPT, max(N - 1, 1))[:, : N - 1]
        passes_BN = torch.nn.functional.pad(u_BD < share_BN[:, 1:], (1, 0), value=True)
        return first_of_traversal(draft, passes_BN & draft.mask_BN)

    def _verdict(self, draft: Draft, node_B: Tensor, probs_BV: Tensor, rng: Stream) -> Verdict:
        next_B = draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        num_accepted_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
        return Verdict(path_to(draft, node_B), num_accepted_B, next_B)

    def _dropped(
        self,
        rule: Distinct | Rejection,
        p_YV: Tensor,
        q_YV: Tensor | None,
        share_Y: Tensor,
        x_Y: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The share of a child x, and its parent's share, p and q once the child was dropped."""
        own_Y = (share_Y * _ratio(p_YV, q_YV, x_Y)).clamp(max=1)
        scaled_YV = share_Y.to(p_YV.dtype)[:, None] * p_YV
        left_YV, next_q_YV = rule.reject(scaled_YV, q_YV, x_Y)
        left_Y = left_YV.sum(1, dtype=share_Y.dtype)
        mass_Y1 = left_Y.to(p_YV.dtype)[:, None]
        after_Y = self.share_after(share_Y, left_Y)
        ended_Y = left_Y.isnan()  # rows after the end of a sequence may hold NaN
        return (
            own_Y,
            torch.where(ended_Y, share_Y, after_Y),
            torch.where(mass_Y1 > 0, left_YV / mass_Y1, p_YV),
            next_q_YV,
        )

    def share_after(self, share_Y: Tensor, left_Y: Tensor) -> Tensor:
        """``S / (S + 1 - a)``: a node's share after a child was dropped; 1 stays 1."""
        return torch.where(share_Y == 1, 1.0, left_Y / (left_Y + 1 - share_Y))


def walk_steps(draft: Draft) -> Sequence[Tensor]:
    """The existing nodes of all rows, grouped by walk step; node i of row b has index b N + i.

    The nodes of one step have different parents, and everything they depend on has an earlier step.
    """
    walk_step_X = (draft.walk_step_BN * draft.mask_BN).flatten()
    step_sizes: list[int] = torch.bincount(walk_step_X).tolist()
    return torch.split(walk_step_X.argsort(stable=True), step_sizes)[1:]


def first_of_traversal(draft: Draft, passes_BN: Tensor) -> Tensor:
    """The first passing node in post-order, siblings by index, shape (B,). The root always passes.

    There is no passing node below that node, nor in the subtrees of the elder siblings of that node
    and of its ancestors.
    """
    above_BNN, parents_BN = draft.ancestors_BNN, draft.parents_BN
    num_passing_BN = (above_BNN & passes_BN[:, :, None]).sum(1)
    elder_BNN = (parents_BN[:, :, None] == parents_BN[:, None]).tril(-1)
    late_BN = any_of(elder_BNN & (num_passing_BN > 0)[:, None])
    is_late_BN = any_of(above_BNN & late_BN[:, None])
    return (passes_BN & (num_passing_BN == 1) & ~is_late_BN).long().argmax(1)


def _ratio(p_YV: Tensor, q_YV: Tensor | None, x_Y: Tensor) -> Tensor:
    """``p(x) / q(x)``; a chosen token has q(x) = 1."""
    p_Y = p_YV.gather(1, x_Y[:, None])[:, 0].to(_wide(p_YV))
    if q_YV is None:
        return p_Y
    q_Y = q_YV.gather(1, x_Y[:, None])[:, 0].to(p_Y.dtype)
    return torch.where(p_Y > 0, p_Y / q_Y, 0.0)


def _wide(p_BNV: Tensor) -> torch.dtype:
    return torch.float32 if p_BNV.device.type == "mps" else torch.float64
