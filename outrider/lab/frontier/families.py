"""What is compared: node-local rules over their parameter, and methods for whole generations.

To add a rule with closed-form acceptance (``core.ClosedFormRule``), add a line to FAMILIES.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.core import ClosedFormRule
from outrider.verifiers import (
    Bild,
    Cascade,
    Ensemble,
    Lenience,
    Mentored,
    Rejection,
    Relaxed,
    Typical,
)


@dataclass(frozen=True)
class Family:
    """A rule with a range of values for one parameter.

    Attributes:
        name: in tables and figures.
        rule: makes the rule from its parameters.
        parameter: the one that is varied; empty for a rule without parameters.
        grid: its values, from the strictest to the most lenient.
        fixed: the other parameters.
    """

    name: str
    rule: Callable[..., ClosedFormRule]
    parameter: str = ""
    grid: tuple[float, ...] = (0.0,)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def rules(self) -> Iterator[tuple[float, ClosedFormRule]]:
        """Every value of the parameter, with its rule."""
        for value in self.grid:
            varied = {self.parameter: value} if self.parameter else {}
            yield value, self.rule(**varied, **self.fixed)


_BUDGETS = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0)
_DISTANCES = (0.003, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
_FROM_1 = (0.99, 0.97, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_THRESHOLDS = (0.5, 0.3, 0.2, 0.09, 0.05, 0.02, 0.01, 0.003, 0.001)
_UNIT = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SIGNED = (-0.9, -0.7, -0.5, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7)


def _typical(epsilon: float) -> Typical:
    """Typical acceptance with δ = √ε, as its authors set it."""
    return Typical(epsilon, epsilon**0.5)


FAMILIES: tuple[Family, ...] = (
    Family("speculative", Rejection),
    Family("mentored kl", Mentored, "budget", _BUDGETS, {"divergence": "kl"}),
    Family("mentored rkl", Mentored, "budget", _BUDGETS, {"divergence": "rkl"}),
    Family("mentored tv", Mentored, "budget", _DISTANCES, {"divergence": "tv"}),
    Family("mentored chi2", Mentored, "budget", _BUDGETS, {"divergence": "chi2"}),
    Family("lenience", Lenience, "lenience", _FROM_1, {"residual": "target-draft"}),
    Family("lenience scaled", Lenience, "lenience", _FROM_1, {"residual": "scaled"}),
    Family("ensemble", Ensemble, "weight", _FROM_1),
    Family("relaxed", Relaxed, "delta", (0.0, *_UNIT), {"top_k": 10}),
    Family("typical", _typical, "epsilon", _THRESHOLDS),
    Family("bild mjsd", Bild, "rollback", (1, 2, 3, 4, 5, 6, 8, 10), {"mode": "mjsd"}),
    Family("cascade chow", Cascade, "alpha", (0.0, *_UNIT), {"deferral": "chow"}),
    Family("cascade diff", Cascade, "alpha", _SIGNED, {"deferral": "diff"}),
    Family("cascade opt", Cascade, "alpha", _SIGNED, {"deferral": "opt"}),
    Family("cascade token_v1", Cascade, "alpha", _SIGNED, {"deferral": "token_v1"}),
    Family("cascade token_v2", Cascade, "alpha", _SIGNED, {"deferral": "token_v2"}),
    Family("cascade token_v3", Cascade, "alpha", (0.0, *_UNIT), {"deferral": "token_v3"}),
)


@dataclass(frozen=True)
class Setting:
    """A method with options, for whole generations."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.method, *(str(value) for value in self.options.values())])


SETTINGS: tuple[Setting, ...] = (
    Setting("plain"),
    Setting("speculative"),
    Setting("block"),
    Setting("mentored", {"budget": 0.05}),
    Setting("mentored", {"budget": 0.2}),
    Setting("mentored", {"budget": 0.8}),
    Setting("lenience", {"lenience": 0.7}),
    Setting("lenience", {"lenience": 0.3}),
    Setting("ensemble", {"weight": 0.7}),
    Setting("ensemble", {"weight": 0.3}),
    Setting("cascade", {"deferral": "token_v3", "alpha": 0.9}),
    Setting("relaxed", {"delta": 0.6}),
    Setting("typical", {"epsilon": 0.09}),
)
