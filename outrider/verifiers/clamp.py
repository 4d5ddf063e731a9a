"""The law nearest to the draft's within a divergence budget of the target's, for ``Mentored``.

Among the laws π whose f-divergence from p, D = Σ p φ(π/p), is at most the budget, the one that
accepts most drafts, max Σ min(q, π), is on one path, the same for every convex φ:

    π = clamp(q, b p, p/α),   α <= 1, b <= 1,   ρ = Σ max(q - p/α, 0) = Σ max(b p - q, 0)

The path is walked by ρ, the probability of a refusal, from TV(p, q), where π = p, downwards; D is
convex and decreasing in ρ. With A the tokens held at p/α, B those held at b p, and P, Q their
masses under the two laws,

    D(ρ) = d(P_A, Q_A - ρ) + Σ_rest d(p, q) + d(P_B, Q_B + ρ),   d(P, m) = P φ(m/P)
    α = P_A / (Q_A - ρ),   b = (Q_B + ρ) / P_B

Every token joins A or B at a ρ of its own. D is known at all these breakpoints from prefix sums
over the tokens in order of p/q; between two of them a safeguarded Newton iteration finds ρ.

Where p = 0 < q, π must be 0 unless tokens off the target's support are allowed: ρ >= q(p = 0).
If they are, ρ goes on below that number at α = 0, and such a token is accepted with probability
1 - ρ / q(p = 0). Where q = 0 < p, the token is in B from the start.

Legend: R rows, V vocabulary, G groups of tokens in ascending order of p/q, C candidates for ρ.
All sums run in float64.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core import Divergence

_AIM = 1 - 5e-7  # of the budget, so that rounding never ends above it
_CLOSE = 4e-7
_MAX_STEPS = 100


@dataclass(frozen=True)
class Clamp:
    """π = clamp(q, b p, p/α), as the parts of a verification rule.

    Attributes:
        alpha_R: accept x iff ``u α q(x) < p(x)``; 0 where all of the target's tokens are accepted.
        b_R: else draw from ``max(b p - q, 0)``.
        off_R: probability of accepting a token that the target never emits.
    """

    alpha_R: Tensor
    b_R: Tensor
    off_R: Tensor


def _d(divergence: Divergence, P: Tensor, m: Tensor) -> Tensor:
    """d(P, m): what tokens of target mass P add to D when they are emitted with mass m."""
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
    """The derivative of d(P, m) by m."""
    if divergence == "tv":
        return (m - P).sign() / 2
    ratio = P / m
    slope = {"kl": -ratio, "rkl": 1 - ratio.log(), "chi2": -(ratio**2)}[divergence]
    return torch.where(P > 0, slope, 0.0)


class Parts(NamedTuple):
    """Masses of the tokens held at p/α (A) and at b p (B), and what all others add to D."""

    divergence: Divergence
    P_A: Tensor
    Q_A: Tensor
    P_B: Tensor
    Q_B: Tensor
    rest: Tensor

    def masses(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """What A and B emit; never less, never more than the target would, rounding included."""
        return (self.Q_A - rho).maximum(self.P_A), (self.Q_B + rho).minimum(self.P_B)

    def divergence_at(self, rho: Tensor) -> Tensor:
        m_A, m_B = self.masses(rho)
        d_A, d_B = (_d(self.divergence, *x) for x in ((self.P_A, m_A), (self.P_B, m_B)))
        return d_A + self.rest + d_B

    def slope_at(self, rho: Tensor) -> Tensor:
        m_A, m_B = self.masses(rho)
        return _slope(self.divergence, self.P_B, m_B) - _slope(self.divergence, self.P_A, m_A)


class Path:
    """The laws between p and q, by ρ.

    Args:
        divergence: what D is.
        P_RG: target mass of the groups; rows sum to 1.
        Q_RG: draft mass of the groups; rows sum to 1.
        d_RG: what each group adds to D where π = q, if neither mass is 0.
        off_support: whether tokens of target mass 0 may be emitted.
    """

    def __init__(
        self, divergence: Divergence, P_RG: Tensor, Q_RG: Tensor, d_RG: Tensor, off_support: bool
    ) -> None:
        self.divergence: Divergence = divergence
        d_RG = torch.where((P_RG > 0) & (Q_RG > 0), d_RG, 0.0)
        sums_3RG = torch.stack([P_RG, Q_RG, d_RG])
        # Column i: of the first i groups, of the last i groups. Both summed from their own end,
        # where the small numbers are.
        self.first_3RG = torch.nn.functional.pad(sums_3RG.cumsum(2), (1, 0))
        self.last_3RG = torch.nn.functional.pad(sums_3RG.flip(2).cumsum(2), (1, 0))
        self.ratio_RG = torch.where(Q_RG > 0, P_RG / Q_RG, torch.inf)
        below_RG, above_RG = self.ratio_RG, self.ratio_RG.flip(1)
        joins_A_RG = self.first_3RG[1, :, 1:] - self.first_3RG[0, :, 1:] / below_RG
        joins_B_RG = self.last_3RG[0, :, 1:] / above_RG - self.last_3RG[1, :, 1:]
        # The ρ at which groups join A (in order) and B (in reverse order). The running maximum
        # repairs what rounding does to the order, which the search needs.
        self.joins_A_RG = torch.where(below_RG > 0, joins_A_RG, 0.0).cummax(1).values.clamp(min=0)
        self.joins_B_RG = joins_B_RG.cummax(1).values.clamp(min=0)
        self.off_R1 = torch.where(P_RG > 0, 0.0, Q_RG).sum(1, keepdim=True)
        self.least_R1 = torch.zeros_like(self.off_R1) if off_support else self.off_R1
        self.most_R1 = (Q_RG - P_RG).clamp(min=0).sum(1, keepdim=True)
        self.num_A_R1 = (below_RG < 1).sum(1, keepdim=True)
        self.num_B_R1 = (above_RG > 1).sum(1, keepdim=True)

    def parts(self, rho_RC: Tensor) -> "Parts":
        """Who is in A and B at these ρ."""
        rho_RC = rho_RC.contiguous()
        A_RC = torch.searchsorted(self.joins_A_RG, rho_RC, right=True).minimum(self.num_A_R1)
        B_RC = torch.searchsorted(self.joins_B_RG, rho_RC, right=True).minimum(self.num_B_R1)
        P_A, Q_A, d_A = (x_RG.gather(1, A_RC) for x_RG in self.first_3RG)
        P_B, Q_B, _ = (x_RG.gather(1, B_RC) for x_RG in self.last_3RG)
        rest = self.first_3RG[2].gather(1, self.ratio_RG.shape[1] - B_RC) - d_A
        return Parts(self.divergence, P_A, Q_A, P_B, Q_B, rest)

    def divergence_at(self, rho_RC: Tensor) -> Tensor:
        """D(ρ), at any number of places."""
        return self.parts(rho_RC).divergence_at(rho_RC)

    def exact(self, budget: float) -> Tensor:
        """The ρ whose D is the budget, less at most a millionth of it, (R, 1)."""
        aim = _AIM * budget
        breaks_RC = torch.cat([self.joins_A_RG, self.joins_B_RG], 1)
        breaks_RC = torch.minimum(breaks_RC.maximum(self.least_R1), self.most_R1)
        over_RC = self.divergence_at(breaks_RC) >= aim
        low_R1 = torch.where(over_RC, breaks_RC, self.least_R1).amax(1, keepdim=True)
        high_R1 = torch.where(over_RC, self.most_R1, breaks_RC).amin(1, keepdim=True)
        whole_R1 = self.divergence_at(self.least_R1) <= budget
        low_R1, high_R1 = (torch.where(whole_R1, self.least_R1, x) for x in (low_R1, high_R1))
        parts, rho_R1 = self.parts(low_R1), low_R1  # nobody joins until high
        for _ in range(_MAX_STEPS):
            excess_R1 = parts.divergence_at(rho_R1) - aim
            low_R1 = torch.where(excess_R1 > 0, rho_R1, low_R1)
            high_R1 = torch.where(excess_R1 > 0, high_R1, rho_R1)
            done_R1 = (excess_R1.abs() <= _CLOSE * budget) | (high_R1 <= low_R1)
            if done_R1.all():
                break
            next_R1 = rho_R1 - excess_R1 / parts.slope_at(rho_R1)
            inside_R1 = (next_R1 > low_R1) & (next_R1 < high_R1)
            next_R1 = torch.where(inside_R1, next_R1, (low_R1 + high_R1) / 2)
            rho_R1 = torch.where(done_R1, rho_R1, next_R1)
        return torch.where(excess_R1 <= _CLOSE * budget, rho_R1, high_R1)

    def blog(self, budget: float) -> Tensor:
        """The author's search: 10 halvings of α, or the first D within 0.8 … 1.2 of the budget."""
        low_R1, high_R1 = torch.zeros_like(self.most_R1), torch.ones_like(self.most_R1)
        for _ in range(10):
            alpha_R1 = (low_R1 + high_R1) / 2
            reached_R1 = self.divergence_at(self.rho_of(alpha_R1))
            low_R1 = torch.where(reached_R1 >= 0.8 * budget, alpha_R1, low_R1)
            high_R1 = torch.where(reached_R1 <= 1.2 * budget, alpha_R1, high_R1)
        all_R1 = self.divergence_at(self.least_R1) <= 1.2 * budget
        return torch.where(all_R1, self.least_R1, self.rho_of(high_R1))

    def rho_of(self, alpha_R1: Tensor) -> Tensor:
        """The probability of a refusal at this α > 0."""
        A_R1 = (self.ratio_RG <= alpha_R1).sum(1, keepdim=True)
        P_A, Q_A, _ = (x_RG.gather(1, A_R1) for x_RG in self.first_3RG)
        rho_R1: Tensor = Q_A - P_A / alpha_R1
        return rho_R1

    def clamp(self, rho_R1: Tensor) -> Clamp:
        """The law at ρ."""
        at = self.parts(rho_R1)
        m_A, m_B = at.masses(rho_R1)
        alpha_R1 = torch.where(rho_R1 > self.least_R1, at.P_A / m_A, 0.0)
        b_R1 = torch.where(at.P_B > 0, m_B / at.P_B, 0.0)
        accepted_R1 = (self.off_R1 - rho_R1).clamp(min=0)
        off_R1 = torch.where(self.off_R1 > 0, accepted_R1 / self.off_R1, 0.0)
        return Clamp(alpha_R1[:, 0], b_R1[:, 0], off_R1[:, 0])


def sorted_path(divergence: Divergence, p_RV: Tensor, q_RV: Tensor, off_support: bool) -> Path:
    """The path with every token a group of its own."""
    P_RV, Q_RV = (x.double() / x.sum(1, keepdim=True, dtype=torch.float64) for x in (p_RV, q_RV))
    order_RV = torch.where(Q_RV > 0, P_RV / Q_RV, torch.inf).argsort(1)
    P_RV, Q_RV = P_RV.gather(1, order_RV), Q_RV.gather(1, order_RV)
    return Path(divergence, P_RV, Q_RV, _d(divergence, P_RV, Q_RV), off_support)
