"""Block verification: accepts the longest prefix that the path as a whole allows.

Sun, Mendlovic, Leviathan, Aharoni, Ro, Beirami and Suresh, "Block Verification Accelerates
Speculative Decoding", ICLR 2025, Algorithm 2 (which writes M_b for the target, M_s for the draft).

    P_0 = 1,   P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))
    S_i = Σ_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0)
    h_i = S_i / (S_i + 1 - P_i)   for i < γ,   h_γ = P_γ
    τ   = the largest i with u_i < h_i, or 0 if there is none
    next token ~ p_{γ+1}   if τ = γ,   else   ~ norm(max(P_τ p_{τ+1} - q_{τ+1}, 0))

S_i <= P_i implies h_i <= P_i. Therefore τ is one of the positions with u_i < P_i; they are tried
from the deepest upwards, so that S is summed at one or two positions per row instead of all. A
compiled program cannot stop early, and sums S at all positions in one kernel.

log P_i is a random walk reflected at 0 and is computed as such. There are no running products, so
long drafts do not underflow (tested with γ = 64).

Preserves: the target distribution exactly; in expectation it accepts at least as many tokens as
token-level rejection, and the most of any rule for a single path. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary. Index i of a (B, D) tensor is the
paper's i+1; P_BN[:, i] belongs to node i, which is the paper's P_i.
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
    at_node,
    draw,
    require_chain,
    walk,
)
from outrider.core.recording import is_recorded
from outrider.verifiers.rejection import Rejection


@dataclass(frozen=True)
class Block:
    """Path-level verification of a chain (Sun et al.)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains.

        Raises:
            IncompatibleError: the draft has branches; the rule verifies a single path.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        if N == 1:
            return walk(Rejection(), draft, p_BNV, rng)
        P_BN = path_probabilities(draft, p_BNV)
        u_BD = rng.uniform(Role.ACCEPT, N - 1)
        depth_D = torch.arange(1, N, device=p_BNV.device)
        find = self._all_at_once if is_recorded() else self._from_the_deepest
        num_B = find(draft, p_BNV, P_BN, u_BD)
        left_BV = self._residual(draft, p_BNV, P_BN, num_B.clamp(max=N - 2))
        from_left_B = (num_B < draft.num_drafted_B) & (left_BV.sum(-1) > 0)
        probs_BV = torch.where(from_left_B[:, None], left_BV, at_node(p_BNV, num_B))
        next_B = draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(depth_D.expand(B, N - 1), num_B, next_B)

    def _all_at_once(self, draft: Draft, p_BNV: Tensor, P_BN: Tensor, u_BD: Tensor) -> Tensor:
        """τ of each row, (B,), with S summed at all positions."""
        N = draft.num_nodes
        depth_D = torch.arange(1, N, device=p_BNV.device)
        weighted_BDV = P_BN[:, :-1, None] * p_BNV[:, :-1]
        if draft.probs_BNV is not None:
            S_BD = (weighted_BDV - draft.probs_BNV[:, :-1]).clamp(min=0).sum(-1)
        else:
            at_x_BD = weighted_BDV.gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
            S_BD = weighted_BDV.sum(-1) - at_x_BD + (at_x_BD - 1).clamp(min=0)
        h_BN = self._acceptance(P_BN, torch.nn.functional.pad(S_BD, (0, 1)))
        is_last_BD = depth_D == draft.num_drafted_B[:, None]
        h_BD = torch.where(is_last_BD, P_BN[:, 1:], h_BN[:, 1:])
        accepts_BD = (u_BD < h_BD) & draft.mask_BN[:, 1:]
        return torch.where(accepts_BD, depth_D, 0).amax(1)

    def _from_the_deepest(self, draft: Draft, p_BNV: Tensor, P_BN: Tensor, u_BD: Tensor) -> Tensor:
        """The same, with S summed where necessary."""
        depth_D = torch.arange(1, draft.num_nodes, device=p_BNV.device)
        possible_BD = (u_BD < P_BN[:, 1:]) & draft.mask_BN[:, 1:]
        num_B = torch.where(possible_BD, depth_D, 0).amax(1)
        open_B = (num_B > 0) & (num_B < draft.num_drafted_B)
        while bool(open_B.any()):
            P_B = P_BN.gather(1, num_B[:, None])[:, 0]
            u_B = u_BD.gather(1, (num_B - 1).clamp(min=0)[:, None])[:, 0]
            h_B = self._acceptance(P_B, self._mass(draft, p_BNV, P_BN, num_B))
            open_B = open_B & (u_B >= h_B)
            possible_BD = possible_BD & ~(open_B[:, None] & (depth_D >= num_B[:, None]))
            num_B = torch.where(possible_BD, depth_D, 0).amax(1)
            open_B = open_B & (num_B > 0)
        return num_B

    def _acceptance(self, P_B: Tensor, S_B: Tensor) -> Tensor:
        """h_i for i < γ."""
        h_B = S_B / (S_B + 1 - P_B)
        return torch.where((S_B == 0) & (P_B == 1), 1.0, h_B)  # 0/0 := 1

    def _mass(self, draft: Draft, p_BNV: Tensor, P_BN: Tensor, node_B: Tensor) -> Tensor:
        """S_i, where node i has a drafted token after it."""
        return self._residual(draft, p_BNV, P_BN, node_B.clamp(max=draft.num_nodes - 2)).sum(-1)

    def _residual(self, draft: Draft, p_BNV: Tensor, P_BN: Tensor, node_B: Tensor) -> Tensor:
        """``max(P_i p_{i+1} - q_{i+1}, 0)`` at one node of each row, (B, V)."""
        weighted_BV = P_BN.gather(1, node_B[:, None]) * at_node(p_BNV, node_B)
        if draft.probs_BNV is not None:
            return (weighted_BV - at_node(draft.probs_BNV, node_B)).clamp_(min=0)
        x_B1 = draft.tokens_BN.gather(
            1, node_B[:, None] + 1
        )  # q is the point mass at a chosen token
        rest_B1 = (weighted_BV.gather(1, x_B1) - 1).clamp_(min=0)
        return weighted_BV.scatter_(1, x_B1, rest_B1)


def path_probabilities(draft: Draft, p_BNV: Tensor) -> Tensor:
    """P_0 … P_γ of a chain, shape (B, N): a random walk of logarithms, reflected at 0."""
    x_BD1 = draft.tokens_BN[:, 1:, None]
    log_ratio_BD = p_BNV[:, :-1].gather(2, x_BD1)[..., 0].log()
    if draft.probs_BNV is not None:
        log_ratio_BD = log_ratio_BD - draft.probs_BNV[:, :-1].gather(2, x_BD1)[..., 0].log()
    log_ratio_BD = torch.where(draft.mask_BN[:, 1:], log_ratio_BD, 0.0)
    walk_BD = log_ratio_BD.cumsum(1)
    reflected_BD = walk_BD - walk_BD.cummax(1).values.clamp(min=0)
    return pad(reflected_BD, (1, 0)).exp()
