"""Acceptance against divergence: how much acceptance a node-local rule gains for its divergence.

At a position where the target has the distribution p and the draft q, a rule accepts the drafted
token with probability R = Σ q r and emits a distribution π. The highest acceptance that any rule
can reach at a divergence D(p, π) is known (see ``verifiers/mentored.py``). Every rule must
therefore stay below that envelope at every position:

    R(rule) <= R(best rule within the budget D(p, π of the rule))

The inequality does not hold for means over positions. A rule may spend more divergence where it
gains more acceptance, and so lie above the mean curve of a rule with equal budgets everywhere.

Legend: K positions, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from outrider.core import ClosedFormRule, Divergence, output_distribution
from outrider.core.divergences import Divergences, divergences

TOLERANCE = 1e-9
"""By how much a rule may exceed the best rule: rounding of sums over the vocabulary."""
REACH = 1e-5
"""By how much the best rule may stay below the envelope; twice what its own tolerance explains."""
_BUDGET_SLACK = 2e-6  # relative; the best rule uses its budget up to a millionth, from below
_BUDGET_ROUNDING = 1e-13  # absolute; divergences near 0 are differences of numbers near 1

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


class BestRule(Protocol):
    """The rule with the highest acceptance within a budget, at fixed positions."""

    def __call__(self, divergence: Divergence, budget_K: Tensor, off_support: bool) -> Tensor:
        """R of the best rule at each position, (K,).

        Args:
            divergence: that the budget limits.
            budget_K: one budget per position; infinite where the result is not used.
            off_support: whether tokens with p = 0 may be emitted.
        """


@dataclass(frozen=True)
class RuleOutcome:
    """Acceptance and divergences of one rule at K positions, in float64.

    Attributes:
        acceptance_K: R.
        divergences: between p and π.
        off_support_K: whether π has mass where p has none.
    """

    acceptance_K: Tensor
    divergences: Divergences
    off_support_K: Tensor

    @classmethod
    def cat(cls, parts: Iterable["RuleOutcome"]) -> "RuleOutcome":
        """The outcomes of one rule at several sets of positions as one."""
        parts = list(parts)
        names = DIVERGENCES
        joined = (torch.cat([getattr(part.divergences, name) for part in parts]) for name in names)
        return cls(
            torch.cat([part.acceptance_K for part in parts]),
            Divergences(**dict(zip(names, joined, strict=True))),
            torch.cat([part.off_support_K for part in parts]),
        )

    def means(self) -> dict[str, float]:
        """The acceptance and each divergence, averaged over the positions."""
        means = {"acceptance": float(self.acceptance_K.mean())}
        for name in DIVERGENCES:
            means[name] = float(getattr(self.divergences, name).mean())
        return means


def rule_outcome(rule: ClosedFormRule, p_KV: Tensor, q_KV: Tensor) -> RuleOutcome:
    """Acceptance and divergences of a rule at K positions.

    Args:
        rule: a rule with closed-form acceptance.
        p_KV: the target's distributions; rows sum to one.
        q_KV: the draft's distributions; rows sum to one.
    """
    known = _KnownAcceptance(rule, rule.acceptance(p_KV, q_KV))
    pi_KV = output_distribution(known, p_KV, q_KV)
    off_support_K = ((p_KV == 0) & (pi_KV > 0)).any(-1)
    return RuleOutcome((q_KV * known.r_KV).sum(-1), divergences(p_KV, pi_KV), off_support_K)


@dataclass(frozen=True)
class _KnownAcceptance:
    """A rule with its acceptance computed in advance, since that can take a sort."""

    rule: ClosedFormRule
    r_KV: Tensor

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return self.r_KV

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        return self.rule.accept(p_V, q_V, x, u)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.rule.reject(p_V, q_V, x)


@dataclass
class Envelope:
    """Whether all rules stay below the best one, and how close they come.

    Attributes:
        comparisons: number of positions at which a rule was compared, by divergence.
        excess: the largest R(rule) - R(best rule) so far, by divergence; negative if all rules
            stayed below.
        worst_rule: name of the rule with that excess, by divergence.
        shortfall: the most by which the best rule, run like the others, stayed below the envelope.
    """

    comparisons: dict[Divergence, int] = field(
        default_factory=lambda: dict.fromkeys(DIVERGENCES, 0)
    )
    excess: dict[Divergence, float] = field(
        default_factory=lambda: dict.fromkeys(DIVERGENCES, -math.inf)
    )
    worst_rule: dict[Divergence, str] = field(
        default_factory=lambda: dict.fromkeys(DIVERGENCES, "")
    )
    shortfall: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether no rule is above the envelope and the best rule is on it; false after any NaN."""
        below = all(excess <= TOLERANCE for excess in self.excess.values())
        return below and self.shortfall <= REACH

    def compare(
        self, name: str, outcome: RuleOutcome, best: BestRule, optimal_for: Divergence | None = None
    ) -> None:
        """Compares a rule with the best rule at the same positions and the same divergence.

        Where the rule emits tokens with p = 0, the best rule may do so too. Positions with an
        infinite divergence are left out, since an unlimited budget allows any acceptance.

        Args:
            name: of the rule.
            outcome: its acceptance and divergences.
            best: the envelope at these positions.
            optimal_for: the divergence for which the rule should lie on the envelope.
        """
        for divergence in DIVERGENCES:
            D_K = getattr(outcome.divergences, divergence)
            budget_K = D_K * (1 + _BUDGET_SLACK) + _BUDGET_ROUNDING
            for off_support in (False, True):
                here_K = ~D_K.isinf() & (outcome.off_support_K == off_support)
                if not bool(here_K.any()):
                    continue
                needed_K = torch.where(here_K & D_K.isfinite(), budget_K, math.inf)
                above_K = outcome.acceptance_K - best(divergence, needed_K, off_support)
                above_K = torch.where(D_K.isnan(), D_K, above_K)[here_K]
                self._count(divergence, name, above_K)
                if divergence == optimal_for:
                    self.shortfall = max(self.shortfall, float(-above_K.min()))

    def _count(self, divergence: Divergence, name: str, above_K: Tensor) -> None:
        self.comparisons[divergence] += len(above_K)
        worst = float(above_K.max())  # NaN if any is
        if worst > self.excess[divergence] or math.isnan(worst):
            self.excess[divergence], self.worst_rule[divergence] = worst, name

    def as_dict(self) -> dict[str, Any]:
        """The comparison as a JSON document."""
        return {
            "holds": self.holds,
            "tolerance": TOLERANCE,
            "comparisons": self.comparisons,
            "worst_excess": self.excess,
            "worst_rule": self.worst_rule,
            "shortfall": self.shortfall,
        }
