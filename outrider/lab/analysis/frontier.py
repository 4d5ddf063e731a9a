"""Acceptance against divergence: what a rule of one place buys, and with how much of the
distribution.

At a place where the target has the distribution p and the draft q, a rule accepts the draft's token
with probability R = Σ q r and emits a distribution π. The best that a divergence D(p, π) can buy is
known (see ``verifiers/mentored.py``). So every rule has to stay below that envelope, place by
place:

    R(rule) <= R(best within the budget D(p, π of the rule))

Means over places keep no such promise. A rule may spend much where it buys much, and end above the
mean curve of equal budgets everywhere.

Legend: K places, V vocabulary.
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
"""By how much a rule may exceed the best: rounding of sums over the vocabulary."""
REACH = 1e-5
"""By how much the best rule may stay below the envelope; twice what its own tolerance explains."""
_BUDGET_MET = 2e-6  # the best rule meets its budget to a millionth, from below
_BUDGET_ROUNDING = 1e-13  # and divergences near 0 are differences of numbers near 1

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)


class Best(Protocol):
    """The rule that accepts most within a budget, at the places at hand."""

    def __call__(self, divergence: Divergence, budget_K: Tensor, off_support: bool) -> Tensor:
        """Its R at each place, within a budget for each place.

        Args:
            divergence: what the budget is for.
            budget_K: infinite where the answer does not matter.
            off_support: whether tokens with p = 0 may be emitted.
        """


@dataclass(frozen=True)
class Places:
    """What one rule does at K places, in float64.

    Attributes:
        acceptance_K: R.
        divergences: between p and π.
        off_support_K: whether π has mass where p has none.
    """

    acceptance_K: Tensor
    divergences: Divergences
    off_support_K: Tensor

    @classmethod
    def cat(cls, parts: Iterable["Places"]) -> "Places":
        parts = list(parts)
        names = DIVERGENCES
        joined = (torch.cat([getattr(part.divergences, name) for part in parts]) for name in names)
        return cls(
            torch.cat([part.acceptance_K for part in parts]),
            Divergences(**dict(zip(names, joined, strict=True))),
            torch.cat([part.off_support_K for part in parts]),
        )

    def means(self) -> dict[str, float]:
        """Means over the places."""
        found = {"acceptance": float(self.acceptance_K.mean())}
        for name in DIVERGENCES:
            found[name] = float(getattr(self.divergences, name).mean())
        return found


def verification(rule: ClosedFormRule, p_KV: Tensor, q_KV: Tensor) -> Places:
    """A rule at the places with these distributions, whose rows sum to one."""
    known = _Known(rule, rule.acceptance(p_KV, q_KV))
    pi_KV = output_distribution(known, p_KV, q_KV)
    off_support_K = ((p_KV == 0) & (pi_KV > 0)).any(-1)
    return Places((q_KV * known.r_KV).sum(-1), divergences(p_KV, pi_KV), off_support_K)


@dataclass(frozen=True)
class _Known:
    """A rule whose acceptance at these places has been worked out, which can take a sort."""

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
    """Whether rules stay below the best, and how close they come.

    Attributes:
        comparisons: number of places at which some rule was held against the best, by divergence.
        excess: the most by which a rule's R exceeded it; negative if none came close.
        by: which rule that was.
        shortfall: the most by which the best rule, run as a rule, stayed below its own envelope.
    """

    comparisons: dict[Divergence, int] = field(
        default_factory=lambda: dict.fromkeys(DIVERGENCES, 0)
    )
    excess: dict[Divergence, float] = field(
        default_factory=lambda: dict.fromkeys(DIVERGENCES, -math.inf)
    )
    by: dict[Divergence, str] = field(default_factory=lambda: dict.fromkeys(DIVERGENCES, ""))
    shortfall: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether no rule is above, and the best one where it should be; NaN is nowhere."""
        below = all(excess <= TOLERANCE for excess in self.excess.values())
        return below and self.shortfall <= REACH

    def hold(
        self, name: str, places: Places, best: Best, optimal_for: Divergence | None = None
    ) -> None:
        """Compares a rule with the best at the same places, at equal divergence.

        Where the rule emits tokens with p = 0, the best may do so, too. An infinite divergence
        buys everything and says nothing: such places do not count.

        Args:
            name: of the rule.
            places: what it does.
            best: the envelope at these places.
            optimal_for: the divergence for which the rule should lie on the envelope.
        """
        for divergence in DIVERGENCES:
            D_K = getattr(places.divergences, divergence)
            budget_K = D_K * (1 + _BUDGET_MET) + _BUDGET_ROUNDING
            for off_support in (False, True):
                here_K = ~D_K.isinf() & (places.off_support_K == off_support)
                if not bool(here_K.any()):
                    continue
                asked_K = torch.where(here_K & D_K.isfinite(), budget_K, math.inf)
                above_K = places.acceptance_K - best(divergence, asked_K, off_support)
                above_K = torch.where(D_K.isnan(), D_K, above_K)[here_K]
                self._count(divergence, name, above_K)
                if divergence == optimal_for:
                    self.shortfall = max(self.shortfall, float(-above_K.min()))

    def _count(self, divergence: Divergence, name: str, above_K: Tensor) -> None:
        self.comparisons[divergence] += len(above_K)
        worst = float(above_K.max())  # NaN if there is one
        if worst > self.excess[divergence] or math.isnan(worst):
            self.excess[divergence], self.by[divergence] = worst, name

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "holds": self.holds,
            "tolerance": TOLERANCE,
            "comparisons": self.comparisons,
            "worst_excess": self.excess,
            "worst_rule": self.by,
            "shortfall": self.shortfall,
        }
