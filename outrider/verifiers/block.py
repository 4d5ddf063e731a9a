"""Block verification: accept the longest prefix that the path as a whole can afford.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, "Block Verification Accelerates
Speculative Decoding", ICLR 2025, Algorithm 2 (which writes M_b for the target, M_s for the draft).

    P_0 = 1,   P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
    S_i = Σ_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = S_i / (S_i + 1 - P_i)   for i < γ,   h_γ = P_γ
    τ   = the largest i with u_i < h_i, 0 if there is none
    τ = γ: the next token comes from p_{γ+1};   else from norm(max(P_τ p_{τ+1} - q_{τ+1}, 0))

The P_i are a random walk in the logarithm, reflected at 0, so they are computed as such: no
product runs, and γ = 64 does not underflow.

Preserves: the target's law, exactly, and accepts at least as many tokens in expectation as
token-level rejection (the most of any rule for one path). Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D candidates (N-1), V vocabulary. Column i of a (B, D) tensor is the
paper's i+1, so P_BN[:, i] belongs to node i.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    require_chain,
    walk,
)
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Block:
    """Path-level verification of a chain (Sun et al.)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "law"
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Judges a batch of chains.

        Raises:
            IncompatibleError: a draft with branches; the rule is for one path.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        if N == 1:
            return walk(Rejection(), draft, p_BNV, rng)
        P_BN = path_probabilities(draft, p_BNV)
        q_BDV = drawn_from(draft, p_BNV)
        left_BDV = (P_BN[:, :-1, None] * p_BNV[:, :-1] - q_BDV).clamp_(min=0)
        h_BD = self._acceptance(P_BN[:, 1:], left_BDV.sum(-1), draft.num_drafted_B)

        u_BD = rng.uniform(Role.ACCEPT, N - 1)
        depth_D = torch.arange(1, N, device=p_BNV.device)
        good_BD = (u_BD < h_BD) & draft.mask_BN[:, 1:]
        num_accepted_B = torch.where(good_BD, depth_D, 0).amax(1)

        rows_B = torch.arange(B, device=p_BNV.device)
        p_BV = p_BNV[rows_B, num_accepted_B]
        left_BV = left_BDV[rows_B, num_accepted_B.clamp(max=N - 2)]
        whole_B = num_accepted_B == draft.num_drafted_B
        from_target_B = whole_B | (left_BV.sum(-1) == 0)
        law_BV = torch.where(from_target_B[:, None], p_BV, left_BV)
        next_B = draw(law_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(depth_D.expand(B, N - 1), num_accepted_B, next_B)

    def _acceptance(self, P_BD: Tensor, left_BD: Tensor, num_drafted_B: Tensor) -> Tensor:
        """h_i of each candidate; ``left`` at node i is the paper's S_i, so S_1 is its column 1."""
        S_BD = pad(left_BD[:, 1:], (0, 1))
        h_BD = S_BD / (S_BD + 1 - P_BD)
        h_BD = torch.where((S_BD == 0) & (P_BD == 1), 1.0, h_BD)  # 0/0 := 1
        depth_D = torch.arange(1, P_BD.shape[1] + 1, device=P_BD.device)
        return torch.where(depth_D == num_drafted_B[:, None], P_BD, h_BD)


def path_probabilities(draft: Draft, p_BNV: Tensor) -> Tensor:
    """P_0 … P_γ of a chain, shape (B, N): the logarithms reflected at 0 from above."""
    x_BD1 = draft.tokens_BN[:, 1:, None]
    log_ratio_BD = p_BNV[:, :-1].gather(2, x_BD1)[..., 0].log()
    if draft.probs_BNV is not None:
        log_ratio_BD = log_ratio_BD - draft.probs_BNV[:, :-1].gather(2, x_BD1)[..., 0].log()
    log_ratio_BD = torch.where(draft.mask_BN[:, 1:], log_ratio_BD, 0.0)
    walk_BD = log_ratio_BD.cumsum(1)
    reflected_BD = walk_BD - walk_BD.cummax(1).values.clamp(min=0)
    return pad(reflected_BD, (1, 0)).exp()


def drawn_from(draft: Draft, p_BNV: Tensor) -> Tensor:
    """The law of each candidate, (B, D, V): the draft's, or the point mass of a chosen token."""
    if draft.probs_BNV is not None:
        return draft.probs_BNV[:, :-1]
    return torch.zeros_like(p_BNV[:, :-1]).scatter_(2, draft.tokens_BN[:, 1:, None], 1.0)
