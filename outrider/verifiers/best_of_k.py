"""Best of K: verifies every branch independently and keeps the longest. A known-biased baseline.

The code released with Qin et al., "Multi-Token Joint Speculative Decoding", 2024, runs this rule
under the name Spectr; the real SpecTr is ``Spectr``. With K branches from one root:

    accept x_j ~ q   iff   u_j q(x_j) < p(x_j),   with its own uniform number u_j for every node
    keep the longest accepted branch, the first of equals
    next token ~ norm(max(p - q, 0))   where that branch was rejected;   ~ p   at its end

Why the rule is biased: each branch alone would be a fair sample, but the longest is selected
*because* of its tokens. Tokens to which the draft gives too much probability get K chances, and the
residual compensates for one rejection only if all K are rejected. At one position, with
t = TV(p, q), up to t - t^K of the mass is misplaced: a quarter for K = 2, nearly a half for K = 4.

The rule exists to reproduce published tables, and to give the tests of lossless rules a wrong rule
to reject. Use ``Spectr``, ``Rejection`` or ``Distinct`` to verify K candidates.

Preserves: nothing but the target's support. Accepts i.i.d. drafts; in a tree, branches share the
decisions about their common nodes.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    match,
    walk,
)
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class BestOfK:
    """Keeps the longest of K independently verified branches. Biased; a baseline."""

    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid"})
    needs: ClassVar[Needs] = "distribution"
    bound: ClassVar[Bound] = Bound("biased: only the target's support is preserved; a baseline")

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        if draft.probs_BNV is None:  # an empty draft
            return walk(Rejection(), draft, p_BNV, rng)
        B, N = draft.tokens_BN.shape
        rows_B = torch.arange(B, device=p_BNV.device)
        parents_BD, x_BD = draft.parents_BN[:, 1:], draft.tokens_BN[:, 1:]
        above_BD = (rows_B[:, None], parents_BD, x_BD)
        u_BD = rng.uniform(Role.ACCEPT, max(N - 1, 1))[:, : N - 1]
        accepted_BD = u_BD * draft.probs_BNV[above_BD] < p_BNV[above_BD]
        index_BN = torch.arange(N, device=p_BNV.device).expand(B, N)
        kept = match(draft, accepted_BD, index_BN)

        node_B = kept.next_token_B  # `match` gathers from `index_BN` at the last accepted node
        rejected_B = (draft.mask_BN[:, 1:] & (parents_BD == node_B[:, None])).any(1)
        p_BV, q_BV = p_BNV[rows_B, node_B], draft.probs_BNV[rows_B, node_B]
        left_BV = (p_BV - q_BV).clamp(min=0)
        from_left_B = rejected_B & (left_BV.sum(1) > 0)
        probs_BV = torch.where(from_left_B[:, None], left_BV, p_BV)
        return replace(kept, next_token_B=draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0]))
