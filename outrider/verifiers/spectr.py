"""K-SEQ: verifies several i.i.d. sequences from one root, position by position.

Sun, Suresh, Ro, Beirami, Jain and Yu, "SpecTr: Fast Speculative Decoding via Optimal Transport",
NeurIPS 2023, Algorithms 2 and 3. At a position where k sequences are still active, their next
tokens are k independent draws from q:

    β(ρ) = Σ min(q, p/ρ),   p_acc(ρ) = 1 - (1 - β)^k
    ρ*   = the smallest ρ in [1, k] with p_acc <= ρ β
    accept the first x in draw order with   u ρ q(x) < p(x)      (succeeds with probability p_acc)
    if there is none, draw from   p - min(q, p/ρ) p_acc / β   and stop

After x is accepted, every active sequence whose next token is x stays active, and q is that of a
sequence that continues. At the end of a sequence the next token is drawn from p. With k = 1, ρ is
1, and the rule is rejection sampling.

A draw yields x and accepts it with probability min(q, p/ρ), so the first accepted token has the
distribution min(q, p/ρ) p_acc / β, and the residual supplies the rest of p. This is valid for every
ρ >= ρ* (for smaller ρ the residual would be negative), and the bisection returns the upper end of
its interval: its precision affects how much is accepted, not the output distribution. At one
position, p_acc is at least 1 - (1 - 1/k)^k times the acceptance of the best rule for k draws (shown
in the paper).

Preserves: the target distribution exactly. Accepts i.i.d. drafts whose sequences branch only at the
root (equal prefixes are repeated, because multiplicity counts), with any lengths and any order of
the nodes. Synchronises with the device at each position and each step of the bisection, unless it
is captured.

Legend: B rows, N nodes, D drafted tokens (N-1), E values of ρ, V vocabulary.
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
    repeat_while,
)
from outrider.core.errors import IncompatibleError
from outrider.core.recording import is_captured, is_recorded
from outrider.core.repeat import narrow

_NUM_BISECTIONS = 30  # ρ within 1e-9 of k
_HALVINGS = 3  # in one step of captured code, which takes the memory of 7 distributions per row


@dataclass(frozen=True)
class Spectr:
    """K-SEQ over several independent sequences (SpecTr)."""

    lossless: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True
    bound: ClassVar[Bound] = LOSSLESS

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of drafts, each of several sequences.

        Raises:
            IncompatibleError: a draft branches below its root.
        """
        if not is_recorded():
            self.check_draft(draft)
        B, N = draft.tokens_BN.shape
        rows_B = torch.arange(B, device=p_BNV.device)
        node_N = torch.arange(N, device=p_BNV.device)
        u_BN = self._uniforms(draft, rng)
        tokens_BN, above_BN = draft.tokens_BN, draft.parents_BN.clamp(min=0)
        drafted_BN = draft.mask_BN & (node_N > 0)

        def some_row_goes_on(node_B: Tensor, next_BN: Tensor, probs_BV: Tensor) -> Tensor:
            return next_BN.any()

        def verify(
            node_B: Tensor, next_BN: Tensor, probs_BV: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            above_B = above_BN[rows_B, next_BN.long().argmax(1)]
            p_BV, q_BV = p_BNV[rows_B, node_B], _probs(draft)[rows_B, above_B]
            num_B = next_BN.sum(1)
            rho_B = self.smallest_rho(p_BV, q_BV, num_B)
            p_x_BN, q_x_BN = p_BV.gather(1, tokens_BN), q_BV.gather(1, tokens_BN)
            good_BN = next_BN & (u_BN * rho_B[:, None] * q_x_BN < p_x_BN)
            first_B = torch.where(good_BN, node_N, N).amin(1)
            accepted_B = first_B < N
            node_B = torch.where(accepted_B, first_B, node_B)
            same_BN = tokens_BN == tokens_BN[rows_B, node_B][:, None]
            active_BN = next_BN & same_BN & accepted_B[:, None]
            rejected_B = (num_B > 0) & ~accepted_B
            left_BV = self.residual(p_BV, q_BV, num_B, rho_B).to(probs_BV.dtype)
            probs_BV = torch.where(rejected_B[:, None], left_BV, probs_BV)
            probs_BV = torch.where(accepted_B[:, None], p_BNV[rows_B, node_B], probs_BV)
            return node_B, active_BN.gather(1, above_BN) & drafted_BN, probs_BV

        # A step per position, at which the nodes `next_BN` are the active sequences' next tokens:
        # the nodes of the next level, so there are as many steps as levels at most, and a walk may
        # visit a node of each.
        from_root_BN = drafted_BN & (draft.parents_BN == 0)
        wide_BV = p_BNV[:, 0].to(torch.promote_types(p_BNV.dtype, _wide(p_BNV)))
        state = torch.zeros_like(rows_B), from_root_BN, wide_BV
        node_B, _, probs_BV = repeat_while(
            some_row_goes_on, verify, state, at_most=draft.walk_length_bound
        )
        num_accepted_B = draft.depth_BN[rows_B, node_B]
        next_B = draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0])
        return Verdict(path_to(draft, node_B), num_accepted_B, next_B)

    def check_draft(self, draft: Draft) -> None:
        """As ``ChecksDrafts``."""
        if draft.is_chain:
            return
        below_root_BN = draft.mask_BN & (draft.parents_BN > 0)
        num_children_BN = torch.zeros_like(draft.tokens_BN)
        num_children_BN.scatter_add_(1, draft.parents_BN.clamp(min=0), below_root_BN.long())
        if (num_children_BN > 1).any():
            raise IncompatibleError(
                "this rule verifies sequences that branch only at the root; the draft branches "
                "below it"
            )

    def smallest_rho(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor) -> Tensor:
        """ρ* in [1, k] for k = ``num`` draws: the upper end of the bisection's last interval."""
        low_B = torch.ones_like(num_B, dtype=_wide(p_BV))
        high_B = num_B.to(low_B.dtype).clamp(min=1)
        p_BV, q_BV = p_BV.to(low_B.dtype), q_BV.to(low_B.dtype)
        if is_captured():  # the same interval, up to rounding, by fewer kernels

            def is_below(rho_BE: Tensor) -> Tensor:
                beta_BE = common(p_BV[:, None], q_BV[:, None], rho_BE).sum(2).clamp(max=1)
                return some_accepted(beta_BE, num_B[:, None]) > rho_BE * beta_BE

            num_steps = -(-_NUM_BISECTIONS // _HALVINGS)
            return narrow(is_below, low_B[:, None], high_B[:, None], 2**_HALVINGS, num_steps)[:, 0]

        def some_row_has_several(low_B: Tensor, high_B: Tensor, num_steps: Tensor) -> Tensor:
            return (num_B > 1).any() & (num_steps < _NUM_BISECTIONS)

        def bisect(
            low_B: Tensor, high_B: Tensor, num_steps: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            rho_B = (low_B + high_B) / 2
            beta_B = common(p_BV, q_BV, rho_B).sum(1).clamp(max=1)
            enough_B = some_accepted(beta_B, num_B) <= rho_B * beta_B
            low_B = torch.where(enough_B, low_B, rho_B)
            return low_B, torch.where(enough_B, rho_B, high_B), num_steps + 1

        state = low_B, high_B, num_B.new_zeros(())
        return repeat_while(some_row_has_several, bisect, state)[1]

    def residual(self, p_BV: Tensor, q_BV: Tensor, num_B: Tensor, rho_B: Tensor) -> Tensor:
        """``p - min(q, p/ρ) p_acc / β``; p if no draw can be accepted or no mass remains."""
        common_BV = common(p_BV, q_BV, rho_B)
        beta_B = common_BV.sum(1).clamp(max=1)
        scale_B = torch.where(beta_B > 0, some_accepted(beta_B, num_B) / beta_B, 0.0)
        left_BV = (p_BV - common_BV * scale_B[:, None]).clamp(min=0)
        return torch.where(left_BV.sum(1, keepdim=True) > 0, left_BV, p_BV.to(left_BV.dtype))

    def _uniforms(self, draft: Draft, rng: Stream) -> Tensor:
        """A uniform number for each node, (B, N), assigned in order of depth: which nodes of a
        depth are verified depends on the numbers used at the depths above."""
        u_BD = rng.uniform(Role.ACCEPT, max(draft.num_nodes - 1, 1))
        rank_BN = draft.depth_BN.argsort(dim=1, stable=True).argsort(1)
        return u_BD.gather(1, (rank_BN - 1).clamp(min=0))


def common(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor) -> Tensor:
    """``min(q, p/ρ)``: the probability that one draw yields x and accepts it. Leading dimensions
    broadcast."""
    return torch.minimum(q_BV.to(rho_B.dtype), p_BV / rho_B[..., None])


def some_accepted(beta_B: Tensor, num_B: Tensor) -> Tensor:
    """``1 - (1 - β)^k``, computed without cancellation for small β."""
    return torch.where(num_B > 0, -torch.expm1(num_B * torch.log1p(-beta_B)), 0.0)


def _probs(draft: Draft) -> Tensor:
    assert draft.probs_BNV is not None, "i.i.d. drafts come with their distributions"
    return draft.probs_BNV


def _wide(p_BV: Tensor) -> torch.dtype:
    return torch.float32 if p_BV.device.type == "mps" else torch.float64
