"""The output distribution of ``Mentored``: the closest to q within a divergence budget around p.

Consider the distributions π whose f-divergence D = Σ p φ(π/p) from p is at most the budget. The one
with the highest acceptance, max Σ min(q, π), lies on a path that is the same for every convex φ:

    π = clamp(q, b p, p/α),   α <= 1, b <= 1,   ρ = Σ max(q - p/α, 0) = Σ max(b p - q, 0)

(b is 1/β in ``mentored.py``.) The path is parametrised by ρ, the probability of a rejection. It
starts at ρ = TV(p, q), where π = p; D is convex in ρ and grows as ρ falls. Let A be the tokens with
π = p/α, B the tokens with π = b p, and P, Q their masses under p and q:

    D(ρ) = d(P_A, Q_A - ρ) + Σ_rest d(p, q) + d(P_B, Q_B + ρ),   d(P, m) = P φ(m/P)
    α = P_A / (Q_A - ρ),   b = (Q_B + ρ) / P_B

Every token joins A or B at a certain ρ. Prefix sums over the tokens in ascending order of p/q
therefore give D at any ρ, and a bracketed Newton iteration finds the ρ at which D is the budget.

Where p = 0 < q, π is 0 unless tokens outside the target's support are allowed; hence ρ >= q(p = 0).
If they are allowed, the path continues below that ρ with α = 0, and such a token is accepted with
probability 1 - ρ / q(p = 0). A token with q = 0 < p is in B from the start.

All sums are in float64.

Legend: R rows to solve, V vocabulary, G groups of tokens in ascending order of p/q, E values
of ρ, Z tokens with mass in both distributions; a leading dimension of 2 is for A and B.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Divergence, repeat_while
from outrider.core.recording import is_captured, is_recorded
from outrider.core.repeat import narrow

_AIM = 1 - 7e-7  # fraction of the budget to aim at, so that rounding never exceeds the budget
_TOLERANCE = 1e-7
_MAX_STEPS = 100
_SECTIONS = 1024, 12  # sections, steps: 120 halvings, where Newton's steps are at most 100
_LARGE = 1024  # in vocabularies from this size on, tokens of mass 0 are merged first


class Clamp(NamedTuple):
    """π = clamp(q, b p, p/α), as the parameters of a verification rule.

    Attributes:
        alpha_R: accept x iff ``u α q(x) < p(x)``; 0 where every token with p(x) > 0 is accepted.
        b_R: after a rejection, draw from ``max(b p - q, 0)``.
        off_R: probability of accepting a token with p(x) = 0.
    """

    alpha_R: Tensor
    b_R: Tensor
    off_R: Tensor


def mass_divergence(divergence: Divergence, P: Tensor, m: Tensor) -> Tensor:
    """d(P, m): the contribution to D of tokens with target mass P and output mass m."""
    if divergence == "tv":
        return (m - P).abs() / 2
    if divergence == "kl":
        d = P * (P / m).log()
    elif divergence == "rkl":
        d = torch.xlogy(m, m / P)
    else:
        d = P * P / m - P
    return torch.where(P > 0, d, 0.0)


def _slope(divergence: Divergence, P: Tensor, m: Tensor) -> Tensor:
    """The derivative of d(P, m) with respect to m."""
    if divergence == "tv":
        return (m - P).sign() / 2
    ratio = P / m
    slope = {"kl": -ratio, "rkl": 1 - ratio.log(), "chi2": -(ratio**2)}[divergence]
    return torch.where(P > 0, slope, 0.0)


class ClampPath:
    """The optimal output distributions between p and q, parametrised by ρ.

    Args:
        divergence: the divergence D.
        P_RG: target mass of the groups; rows sum to 1.
        Q_RG: draft mass of the groups; rows sum to 1.
        d_RG: contribution of each group to D where π = q, if neither mass is 0.
        off_support: whether tokens of target mass 0 may be emitted.
    """

    def __init__(
        self, divergence: Divergence, P_RG: Tensor, Q_RG: Tensor, d_RG: Tensor, off_support: bool
    ) -> None:
        self.divergence: Divergence = divergence
        d_RG = torch.where((P_RG > 0) & (Q_RG > 0), d_RG, 0.0)
        sums_3RG = torch.stack([P_RG, Q_RG, d_RG])
        # Index i of [0] sums the first i groups (A), index i of [1] the last i groups (B). Each sum
        # starts at its own end, where the small numbers are.
        self.sums_23RG = pad(torch.stack([sums_3RG, sums_3RG.flip(2)]).cumsum(3), (1, 0))
        self.ratio_RG = torch.where(Q_RG > 0, P_RG / Q_RG, torch.inf)
        ratio_2RG = torch.stack([self.ratio_RG, self.ratio_RG.flip(1)])
        joins_2RG = self.sums_23RG[:, 1, :, 1:] - self.sums_23RG[:, 0, :, 1:] / ratio_2RG
        joins_2RG[1].neg_()
        # The ρ at which each group joins. The running maximum restores the order, which the search
        # relies on and rounding may violate.
        joins_2RG = torch.where(ratio_2RG > 0, joins_2RG, 0.0).cummax(2).values
        self.joins_2RG = joins_2RG.clamp_(min=0)
        self.most_2R1 = torch.stack([self.ratio_RG < 1, self.ratio_RG > 1]).sum(2, keepdim=True)
        self.off_R1 = torch.where(P_RG > 0, 0.0, Q_RG).sum(1, keepdim=True)
        self.least_R1 = torch.zeros_like(self.off_R1) if off_support else self.off_R1
        self.top_R1 = (Q_RG - P_RG).clamp(min=0).sum(1, keepdim=True)  # TV(p, q)

    def sizes(self, rho_R1: Tensor) -> Tensor:
        """The number of groups in A and in B at this ρ, (2, R, 1)."""
        size_2R1 = torch.searchsorted(
            self.joins_2RG, rho_R1.expand(2, -1, -1).contiguous(), right=True
        )
        return size_2R1.minimum(self.most_2R1)

    def masses(self, rho_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Target mass and output mass of A and B, (2, R, 1) each, and the rest's share of D."""
        size_2R1 = self.sizes(rho_R1)
        at_231R = self.sums_23RG.gather(3, size_2R1[:, None].expand(-1, 3, -1, -1))
        P_2R1, Q_2R1, d_2R1 = at_231R.unbind(1)
        # In A the output mass is at least the target mass, in B at most, even after rounding.
        m_A_R1 = (Q_2R1[0] - rho_R1).maximum(P_2R1[0])
        m_B_R1 = (Q_2R1[1] + rho_R1).minimum(P_2R1[1])
        to_B_R1 = self.ratio_RG.shape[1] - size_2R1[1]
        rest_R1 = self.sums_23RG[0, 2].gather(1, to_B_R1) - d_2R1[0]
        return P_2R1, torch.stack([m_A_R1, m_B_R1]), rest_R1

    def divergence_at(self, rho_R1: Tensor) -> Tensor:
        """D(ρ)."""
        P_2R1, m_2R1, rest_R1 = self.masses(rho_R1)
        return mass_divergence(self.divergence, P_2R1, m_2R1).sum(0) + rest_R1

    def exact(
        self, budget: float, start_R1: Tensor | None = None, tolerance: float = _TOLERANCE
    ) -> Tensor:
        """The ρ at which D equals the budget, or falls short of it by at most a millionth.

        A bracketed Newton iteration on the square root of D, which is nearly linear in ρ. Where a
        step would leave the bracket, or is more than half as long as the one before, the bracket is
        halved instead: where tokens join A, the slope of D changes at once, and steps may go back
        and forth over that point. The number of steps depends on the distributions, so captured
        code divides the bracket into sections instead, a fixed number of times, and evaluates D at
        all their ends at once.
        """
        aim = _AIM * budget
        if is_captured():
            whole_R1 = self.divergence_at(self.least_R1) <= budget
            ends = self.least_R1, self.top_R1
            rho_R1 = narrow(lambda rho_RE: self.divergence_at(rho_RE) > aim, *ends, *_SECTIONS)
            return torch.where(whole_R1, self.least_R1, rho_R1)
        if start_R1 is None:
            whole_R1 = self.divergence_at(self.least_R1) <= budget
            start_R1 = (self.least_R1 + self.top_R1) / 2
        else:
            whole_R1 = start_R1 <= self.least_R1

        def some_row_is_open(*state: Tensor) -> Tensor:
            *_, done_R1, num_steps = state
            return ~done_R1.all() & (num_steps < _MAX_STEPS)

        def newton(
            rho_R1: Tensor,
            low_R1: Tensor,
            high_R1: Tensor,
            moved_R1: Tensor,
            _: Tensor,
            num_steps: Tensor,
        ) -> tuple[Tensor, ...]:
            P_2R1, m_2R1, rest_R1 = self.masses(rho_R1)
            D_R1 = mass_divergence(self.divergence, P_2R1, m_2R1).sum(0) + rest_R1
            excess_R1 = D_R1 - aim
            done_R1 = (excess_R1.abs() <= tolerance * budget) | whole_R1
            over_R1 = excess_R1 > 0
            low_R1 = torch.where(over_R1, rho_R1, low_R1)
            high_R1 = torch.where(over_R1, high_R1, rho_R1)
            slope_A_R1, slope_B_R1 = _slope(self.divergence, P_2R1, m_2R1)
            ratio_R1 = (aim / D_R1).sqrt()
            next_R1 = rho_R1 - 2 * D_R1 * (1 - ratio_R1) / (slope_B_R1 - slope_A_R1)
            inside_R1 = (next_R1 > low_R1) & (next_R1 < high_R1)
            inside_R1 &= (next_R1 - rho_R1).abs() <= moved_R1 / 2
            next_R1 = torch.where(inside_R1, next_R1, (low_R1 + high_R1) / 2)
            next_R1 = torch.where(done_R1, rho_R1, next_R1)
            moved_R1 = (next_R1 - rho_R1).abs()
            return next_R1, low_R1, high_R1, moved_R1, done_R1, num_steps + 1

        rho_R1 = torch.where(whole_R1, self.least_R1, start_R1)
        none_R1, num_steps = torch.zeros_like(whole_R1), rho_R1.new_zeros((), dtype=torch.int64)
        far_R1 = torch.full_like(rho_R1, torch.inf)
        state = rho_R1, self.least_R1, self.top_R1, far_R1, none_R1, num_steps
        rho_R1, _, high_R1, _, done_R1, _ = repeat_while(some_row_is_open, newton, state)
        return torch.where(done_R1, rho_R1, high_R1)

    def blog(self, budget: float) -> Tensor:
        """The author's search: ten bisections of α, or until D is 0.8 … 1.2 times the budget."""
        low_R1, high_R1 = torch.zeros_like(self.top_R1), torch.ones_like(self.top_R1)
        for _ in range(10):
            alpha_R1 = (low_R1 + high_R1) / 2
            reached_R1 = self.divergence_at(self.rho_of(alpha_R1))
            low_R1 = torch.where(reached_R1 >= 0.8 * budget, alpha_R1, low_R1)
            high_R1 = torch.where(reached_R1 <= 1.2 * budget, alpha_R1, high_R1)
        all_R1 = self.divergence_at(self.least_R1) <= 1.2 * budget
        return torch.where(all_R1, self.least_R1, self.rho_of(high_R1))

    def rho_of(self, alpha_R1: Tensor) -> Tensor:
        """The probability of a rejection at this α > 0."""
        size_R1 = (self.ratio_RG <= alpha_R1).sum(1, keepdim=True)
        P_R1, Q_R1 = (x_RG.gather(1, size_R1) for x_RG in self.sums_23RG[0, :2])
        rho_R1: Tensor = Q_R1 - P_R1 / alpha_R1
        return rho_R1

    def clamp(self, rho_R1: Tensor) -> Clamp:
        """The output distribution at ρ."""
        P_2R1, m_2R1, _ = self.masses(rho_R1)
        alpha_R1 = torch.where(rho_R1 > self.least_R1, P_2R1[0] / m_2R1[0], 0.0)
        b_R1 = torch.where(P_2R1[1] > 0, m_2R1[1] / P_2R1[1], 0.0)
        accepted_R1 = (self.off_R1 - rho_R1).clamp(min=0)
        off_R1 = torch.where(self.off_R1 > 0, accepted_R1 / self.off_R1, 0.0)
        return Clamp(alpha_R1[:, 0], b_R1[:, 0], off_R1[:, 0])


def sorted_path(divergence: Divergence, p_RV: Tensor, q_RV: Tensor, off_support: bool) -> ClampPath:
    """The path of these distributions, with every token in its own group."""
    P_RV, Q_RV = (x.double() / x.sum(1, keepdim=True, dtype=torch.float64) for x in (p_RV, q_RV))
    if P_RV.shape[1] >= _LARGE and not is_captured():  # merging reads how many tokens remain
        P_RV, Q_RV = _without_zeros(P_RV, Q_RV)
    order_RV = torch.where(Q_RV > 0, P_RV / Q_RV, torch.inf).argsort(1)
    P_RV, Q_RV = P_RV.gather(1, order_RV), Q_RV.gather(1, order_RV)
    return ClampPath(divergence, P_RV, Q_RV, mass_divergence(divergence, P_RV, Q_RV), off_support)


def _without_zeros(P_RV: Tensor, Q_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Merges all tokens of target mass 0 into one group, and all of draft mass 0 into another.

    The tokens of such a group join A or B together, so the path does not change. After top-k or
    top-p, most tokens belong to these groups.
    """
    both_RV = (P_RV > 0) & (Q_RV > 0)
    count_R = both_RV.sum(1)
    most: Any = count_R.max().item()  # a symbol in a program that is being traced
    if not is_recorded() and 4 * most > P_RV.shape[1]:  # sorting costs less
        return P_RV, Q_RV
    row_Z, token_Z = both_RV.nonzero(as_tuple=True)
    first_R = count_R.cumsum(0) - count_R
    slot_Z = torch.arange(row_Z.shape[0], device=row_Z.device) - first_R[row_Z]
    groups = []
    for own_RV, other_RV in ((P_RV, Q_RV), (Q_RV, P_RV)):
        kept_RZ = own_RV.new_zeros(count_R.shape[0], most)
        kept_RZ[row_Z, slot_Z] = own_RV[row_Z, token_Z]
        alone_R1 = torch.where(other_RV > 0, 0.0, own_RV).sum(1, keepdim=True)
        groups.append((alone_R1, kept_RZ))
    (P_only_R1, P_RZ), (Q_only_R1, Q_RZ) = groups
    none_R1 = torch.zeros_like(P_only_R1)
    return torch.cat([none_R1, P_only_R1, P_RZ], 1), torch.cat([Q_only_R1, none_R1, Q_RZ], 1)
