"""Traversal verification: a tree from its leaves to its root, lossless for any kind of draws.

Weng, Hu, Chen, Li, Mei, Qiu, Tian and Shi, "Traversal Verification for Speculative Tree Decoding",
NeurIPS 2025 (arXiv 2505.12398), which writes M_b for the target, M_s for the draft. Each node has a
share a, a target law p and a draft law q of its next child; the root has a = 1. For each child c in
draw order, before the node itself:

    a_c = min(1, a p(c) / q(c));   judge c and all below it with that share
    where nothing there is accepted:
    r = max(a p - q, 0),   S = Σ r,   a <- S / (S + 1 - a),   p <- r / S
    q <- the law of the next child, as after any refusal
    no child left:   accept the node with probability a, and draw the next token from p;
                     else drop it

Why it is lossless. Call a node well judged if, over the draws below it, it is kept with probability
a, and the token after it then has the law p. A leaf is. If c is, children drawn as c supply
q(c) a_c = min(q, a p)(c), so r is what a p still lacks; nothing was accepted with probability
1 - Σ min(q, a p) = 1 - a + S; and given that, the rest has to supply a share S / (S + 1 - a) of the
law r / S, from the law that q has become. By induction the root is well judged with a = 1.

On a chain this is block verification. As there, the shares do not depend on the random numbers, so
all are computed at once, in topological order, and the verdict is the first node of the traversal
with u < a. A path can make up for an unlikely token by a likely one further on, and a dropped leaf
leaves its ancestors a chance: both save tokens that a walk from the root loses.

Preserves: the target's law, exactly. Accepts trees and chains of i.i.d., distinct (with Sequoia's
cover, see ``distinct.py``) and chosen drafts.

Legend: B rows, N nodes, V vocabulary.
"""

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
    needs: ClassVar[Needs] = "law"
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        B, N = draft.tokens_BN.shape
        share_BN, law_BNV = self.shares(draft, p_BNV)
        u_BD = rng.uniform(Role.ACCEPT, max(N - 1, 1))[:, : N - 1]
        good_BN = torch.nn.functional.pad(u_BD < share_BN[:, 1:], (1, 0), value=True)
        node_B = first_of_traversal(draft, good_BN & draft.mask_BN)

        rows_B = torch.arange(B, device=p_BNV.device)
        next_B = draw(law_BNV[rows_B, node_B], rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(path_to(draft, node_B), draft.depth_BN[rows_B, node_B], next_B)

    def shares(self, draft: Draft, p_BNV: Tensor) -> tuple[Tensor, Tensor]:
        """a and p of each node once all its children were dropped, (B, N) and (B, N, V).

        A node's children come after it and its siblings in the order of their numbers, so that one
        pass sees each node's own share before its children, and their effect on it afterwards.
        """
        B, N = draft.tokens_BN.shape
        rows_B = torch.arange(B, device=p_BNV.device)
        law_BNV = p_BNV.clone()
        q_BNV = None if draft.probs_BNV is None else draft.probs_BNV.clone()
        share_BN = torch.ones(B, N, dtype=_wide(p_BNV), device=p_BNV.device)
        rule = Distinct() if draft.drawn == "distinct" else Rejection()
        for i in range(1, N):
            above_B, x_B = draft.parents_BN[:, i].clamp(min=0), draft.tokens_BN[:, i]
            exists_B = draft.mask_BN[:, i]
            p_BV = law_BNV[rows_B, above_B]
            share_B = share_BN[rows_B, above_B]
            owed_BV = share_B[:, None] * p_BV
            q_BV = None if q_BNV is None else q_BNV[rows_B, above_B]
            share_BN[:, i] = _ratio(owed_BV, q_BV, x_B).clamp(max=1)

            left_BV, next_q_BV = rule.refuse(owed_BV, q_BV, x_B)
            left_B = left_BV.sum(1)
            after_B = self.share_after(share_B, left_B)
            some_B = exists_B & (left_B > 0)
            left_BV = (left_BV / left_B.where(some_B, 1)[:, None]).to(p_BV.dtype)
            law_BNV[rows_B, above_B] = torch.where(some_B[:, None], left_BV, p_BV)
            share_BN[rows_B, above_B] = torch.where(exists_B, after_B, share_B)
            if q_BNV is not None and q_BV is not None and next_q_BV is not None:
                q_BNV[rows_B, above_B] = torch.where(exists_B[:, None], next_q_BV, q_BV)
        return share_BN, law_BNV

    def share_after(self, share_B: Tensor, left_B: Tensor) -> Tensor:
        """``S / (S + 1 - a)``, a node's share once a child was dropped; 1 stays 1."""
        return torch.where(share_B == 1, 1.0, left_B / (left_B + 1 - share_B))


def first_of_traversal(draft: Draft, good_BN: Tensor) -> Tensor:
    """The first good node in post-order, siblings by number; the root is good. Shape (B,)."""
    subtree_BN = (draft.ancestors_BNN & good_BN[:, :, None]).any(1)
    node_B = torch.zeros_like(draft.tokens_BN[:, 0])
    for i in range(1, draft.num_nodes):
        enters_B = (draft.parents_BN[:, i] == node_B) & subtree_BN[:, i]
        node_B = torch.where(enters_B, i, node_B)
    return node_B


def _ratio(owed_BV: Tensor, q_BV: Tensor | None, x_B: Tensor) -> Tensor:
    """``a p(x) / q(x)``; a chosen token has q(x) = 1."""
    owed_B = owed_BV.gather(1, x_B[:, None])[:, 0]
    if q_BV is None:
        return owed_B
    q_B = q_BV.gather(1, x_B[:, None])[:, 0]
    return torch.where(owed_B > 0, owed_B / q_B, 0.0)


def _wide(p_BNV: Tensor) -> torch.dtype:
    return torch.float32 if p_BNV.device.type == "mps" else torch.float64
