"""Traversal verification: a tree from its leaves to its root, lossless for any kind of draws.

Weng, Hu, Chen, Li, Mei, Qiu, Tian and Shi, "Traversal Verification for Speculative Tree Decoding",
NeurIPS 2025 (arXiv 2505.12398), which writes M_b for the target, M_s for the draft. Each node has a
share a, a target distribution p and a draft distribution q of its next child; the root has a = 1.
For each child c in draw order, before the node itself:

    a_c = min(1, a p(c) / q(c));   verify c and all below it with that share
    where nothing there is accepted:
    r = max(a p - q, 0),   S = Σ r,   a <- S / (S + 1 - a),   p <- r / S
    q <- the distribution of the next child, as after any rejection
    no child left:   accept the node with probability a, and draw the next token from p;
                     else drop it

Why it is lossless. Call a node well verified if, over the draws below it, it is kept with
probability a, and the token after it then has the distribution p. A leaf is. If c is, children
drawn as c supply q(c) a_c = min(q, a p)(c), so r is what a p still lacks; nothing was accepted with
probability 1 - Σ min(q, a p) = 1 - a + S; and given that, the rest has to supply a share S / (S + 1
- a) of the distribution r / S, from the distribution that q has become. By induction the root is
well verified with a = 1.

On a chain this is block verification. As there, the shares do not depend on the random numbers, so
all are computed at once, whatever stands at the same turn of a walk from the root together, and the
verdict is the first node of the traversal with u < a. A path can make up for an unlikely token by a
likely one further on, and a dropped leaf leaves its ancestors a chance: both save tokens that a
walk from the root loses.

Preserves: the target's distribution, exactly. Accepts trees and chains of i.i.d., distinct (with
Sequoia's cover, see ``distinct.py``) and chosen drafts. Reads the shape from the device once per
round.

Legend: B rows, N nodes, V vocabulary; R all nodes of all rows, C the children of one turn.
"""

from collections.abc import Sequence
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
    Role,
    Stream,
    Verdict,
    draw,
    path_to,
)
from outrider.verifiers.distinct import Distinct
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Traversal:
    """Leaf-to-root verification of a tree (Weng et al.)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "distinct", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        B, N = draft.tokens_BN.shape
        share_BN, probs_BNV = self.shares(draft, p_BNV)
        u_BD = rng.uniform(Role.ACCEPT, max(N - 1, 1))[:, : N - 1]
        good_BN = torch.nn.functional.pad(u_BD < share_BN[:, 1:], (1, 0), value=True)
        node_B = first_of_traversal(draft, good_BN & draft.mask_BN)

        rows_B = torch.arange(B, device=p_BNV.device)
        next_B = draw(probs_BNV[rows_B, node_B], rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(path_to(draft, node_B), draft.depth_BN[rows_B, node_B], next_B)

    def shares(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """a and p of each node once all its children were dropped, (B, N) and (B, N, V).

        A child comes at a later turn than its parent and its elder siblings, so that one pass sees
        each node's own share before its children, and their effect on it afterwards.
        """
        B, N = draft.tokens_BN.shape
        token_R = draft.tokens_BN.flatten()
        row_B1 = torch.arange(0, B * N, N, device=p_BNV.device)[:, None]
        parent_R = (draft.parents_BN + row_B1).flatten()
        probs_RV = p_BNV.flatten(0, 1).clone()
        q_RV = None if draft.probs_BNV is None else draft.probs_BNV.flatten(0, 1)
        share_R = torch.ones(B * N, dtype=_wide(p_BNV), device=p_BNV.device)
        rule = Distinct() if draft.drawn == "distinct" else Rejection()
        if q_RV is not None and draft.drawn == "distinct":
            q_RV = q_RV.clone()
        for child_C in turns(draft):
            above_C, x_C = parent_R[child_C], token_R[child_C]
            p_CV, share_C = probs_RV[above_C], share_R[above_C]
            q_CV = None if q_RV is None else q_RV[above_C]
            share_R[child_C] = (share_C * _ratio(p_CV, q_CV, x_C)).clamp(max=1)

            owed_CV = share_C.to(p_CV.dtype)[:, None] * p_CV
            left_CV, next_q_CV = rule.reject(owed_CV, q_CV, x_C)
            left_C = left_CV.sum(1, dtype=share_C.dtype)
            mass_C1 = left_C.to(p_CV.dtype)[:, None]
            probs_RV[above_C] = torch.where(mass_C1 > 0, left_CV / mass_C1, p_CV)
            after_C = self.share_after(share_C, left_C)
            share_R[above_C] = torch.where(
                left_C.isnan(), share_C, after_C
            )  # an ended node's distribution
            if q_RV is not None and next_q_CV is not None and draft.drawn == "distinct":
                q_RV[above_C] = next_q_CV
        return share_R.view(B, N), probs_RV.view_as(p_BNV)

    def share_after(self, share_C: Tensor, left_C: Tensor) -> Tensor:
        """``S / (S + 1 - a)``, a node's share once a child was dropped; 1 stays 1."""
        return torch.where(share_C == 1, 1.0, left_C / (left_C + 1 - share_C))


def turns(draft: Draft) -> Sequence[Tensor]:
    """The nodes that exist by their turns, all rows together, each (C,) in b N + i.

    Nodes of one turn have different parents, and all that they depend on has an earlier turn.
    """
    walk_step_R = (draft.walk_step_BN * draft.mask_BN).flatten()
    num_turns: list[int] = torch.bincount(walk_step_R).tolist()
    return torch.split(walk_step_R.argsort(stable=True), num_turns)[1:]


def first_of_traversal(draft: Draft, good_BN: Tensor) -> Tensor:
    """The first good node in post-order, siblings by number; the root is good. Shape (B,).

    It has no good node below it, and neither has an elder sibling of it or of its ancestors.
    """
    above_BNN, parents_BN = draft.ancestors_BNN, draft.parents_BN
    num_good_BN = (above_BNN & good_BN[:, :, None]).sum(1)
    elder_BNN = (parents_BN[:, :, None] == parents_BN[:, None]).tril(-1)
    late_BN = (elder_BNN & (num_good_BN > 0)[:, None]).any(2)
    is_late_BN = (above_BNN & late_BN[:, None]).any(2)
    return (good_BN & (num_good_BN == 1) & ~is_late_BN).long().argmax(1)


def _ratio(p_CV: Tensor, q_CV: Tensor | None, x_C: Tensor) -> Tensor:
    """``p(x) / q(x)``; a chosen token has q(x) = 1."""
    p_C = p_CV.gather(1, x_C[:, None])[:, 0].to(_wide(p_CV))
    if q_CV is None:
        return p_C
    q_C = q_CV.gather(1, x_C[:, None])[:, 0].to(p_C.dtype)
    return torch.where(p_C > 0, p_C / q_C, 0.0)


def _wide(p_BNV: Tensor) -> torch.dtype:
    return torch.float32 if p_BNV.device.type == "mps" else torch.float64
