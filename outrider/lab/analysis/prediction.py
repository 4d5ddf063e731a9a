"""Predicted against measured speed-up, and which factor a shortfall is due to.

A round emits E[X] tokens and takes, in units of a plain decoding step's target pass,

    c γ      the draft passes
    β        the target's verifying pass
    overhead everything else, beyond what a plain step of the same engine spends outside its pass

so that speed-up = tokens / (c γ + β + overhead). Leviathan et al. (ICML 2023, theorem 3.8) predict
it with E[X] from α, β = 1 and no overhead. The difference between two speed-ups, for example
between the measured one and the prediction or the one that a paper printed, is the product of five
ratios, one for each factor:

    alpha       E[X] under independent acceptance
    dependence  measured tokens per round over E[X]; above 1 where easy and hard parts differ, and
                with trees and lossy rules, which accept more than α says
    c           the draft passes
    beta        the verifying pass
    overhead    the rest

c γ, β and overhead add up in one denominator, so the ratio of one depends on the order in which
the factors are exchanged. The logarithms are therefore averaged over all orders (Shapley, "A value
for n-person games", 1953): the shares do not depend on an order, and they add up exactly.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.speedup import round_cost, speedup
from outrider.lab.analysis.tokens_per_round import expected_tokens

FACTORS = ("alpha", "dependence", "c", "beta", "overhead")


@dataclass(frozen=True)
class Factors:
    """What determines a speed-up.

    Attributes:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round; a mean over rounds may be a fraction.
        dependence: measured tokens per round over those expected from α.
        c: time of the draft passes per drafted token, over that of plain decoding's target pass.
        beta: time of the verifying pass over that of plain decoding's target pass.
        overhead: other time of a round beyond that of a plain step, in the same unit. Negative
            where a plain step spends relatively more outside its pass than a round does.
    """

    alpha: float
    gamma: float
    dependence: float = 1.0
    c: float = 0.0
    beta: float = 1.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        self.speedup  # noqa: B018  # raises if a factor is out of range

    @property
    def tokens(self) -> float:
        """Tokens per round."""
        return expected_tokens(self.alpha, self.gamma) * self.dependence

    @property
    def cost(self) -> float:
        """Time of a round in units of a plain step's target pass."""
        return round_cost(self.gamma, self.c, self.beta + self.overhead)

    @property
    def speedup(self) -> float:
        """Speed-up over plain decoding with all factors."""
        return self.tokens / self.cost

    @property
    def predicted(self) -> float:
        """Speed-up by the formula E / (c γ + β): independent acceptance and no overhead."""
        return speedup(self.alpha, self.gamma, self.c, self.beta)

    def as_dict(self) -> dict[str, float]:
        """All numbers as a JSON document."""
        derived = ("tokens", "cost", "speedup", "predicted")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def ideal(factors: Factors) -> Factors:
    """The limit with the same γ: every token accepted, a free draft, β = 1 and no overhead."""
    return Factors(alpha=1.0, gamma=factors.gamma)


def measured_factors(
    *,
    alpha: float,
    gamma: float,
    tokens: float,
    draft_seconds: float,
    target_seconds: float,
    other_seconds: float,
    plain_target_seconds: float,
    plain_other_seconds: float,
) -> Factors:
    """The factors of a measured run, whose product is the measured speed-up exactly.

    A plain step takes t + o, of which t is its target pass; a round takes D + V + R. From
    speed-up = tokens (t + o) / (D + V + R) follow c γ = D / t, β = V / t and
    overhead = (D + V + R) / (t + o) - (D + V) / t, in units of t.

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: drafted tokens per round, above 0.
        tokens: emitted tokens per round.
        draft_seconds, target_seconds, other_seconds: D, V and R, of a round.
        plain_target_seconds, plain_other_seconds: t and o, of a plain step.

    Raises:
        InvalidParameterError: a number out of range.
    """
    seconds = draft_seconds, target_seconds, other_seconds, plain_other_seconds
    if not gamma > 0 or not plain_target_seconds > 0 or min(seconds) < 0:
        raise InvalidParameterError(
            "factors need gamma and plain_target_seconds above 0, and no seconds below 0"
        )
    plain = plain_target_seconds + plain_other_seconds
    passes = (draft_seconds + target_seconds) / plain_target_seconds
    return Factors(
        alpha=alpha,
        gamma=gamma,
        dependence=tokens / expected_tokens(alpha, gamma),
        c=draft_seconds / plain_target_seconds / gamma,
        beta=target_seconds / plain_target_seconds,
        overhead=(draft_seconds + target_seconds + other_seconds) / plain - passes,
    )


def published_factors(
    speedup: float, *, alpha: float, gamma: float, c: float, beta: float = 1.0
) -> Factors:
    """The factors of a speed-up that a paper prints with its α, γ and c.

    What the formula does not explain of it counts to the dependence between positions, so that the
    product of the factors is the printed speed-up.

    Args:
        speedup: as printed.
        alpha, gamma, c, beta: as printed; without a word about it, β is 1.

    Raises:
        InvalidParameterError: a number out of range.
    """
    if not speedup > 0:
        raise InvalidParameterError(f"speedup={speedup!r}: must be above 0")
    formula = Factors(alpha=alpha, gamma=gamma, c=c, beta=beta)
    return replace(formula, dependence=speedup / formula.speedup)


@dataclass(frozen=True)
class Shortfall:
    """How the factors explain the ratio of two speed-ups.

    Attributes:
        measured: the factors of a run.
        reference: what the run is compared with.
        ratios: by factor, what it multiplies the reference's speed-up by; below 1 for a loss. Their
            product is ``measured.speedup / reference.speedup``.
    """

    measured: Factors
    reference: Factors
    ratios: Mapping[str, float]

    @property
    def largest(self) -> str | None:
        """The factor that costs the most speed-up; None if no factor costs any."""
        name = min(self.ratios, key=lambda each: self.ratios[each])
        return name if self.ratios[name] < 1 else None

    def share(self, factor: str) -> float:
        """The factor's part of the logarithm of the whole ratio; 0 if both speed-ups are equal.

        The shares add up to 1. One is negative if its factor works against the others.
        """
        whole = sum(map(math.log, self.ratios.values()))
        return math.log(self.ratios[factor]) / whole if whole else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All numbers as a JSON document."""
        return {
            "factors": self.measured.as_dict(),
            "reference": self.reference.as_dict(),
            "ratios": dict(self.ratios),
            "largest": self.largest,
        }


def shortfall(measured: Factors, reference: Factors | None = None) -> Shortfall:
    """Divides the ratio of two speed-ups among the factors.

    Args:
        measured: the factors of a run.
        reference: the factors it is compared with; None takes :func:`ideal`. Its γ need not be the
            same: the difference then counts to ``alpha`` for the tokens, and to ``c`` for the cost.
    """
    reference = ideal(measured) if reference is None else reference
    orders = list(itertools.permutations(FACTORS))
    logs = dict.fromkeys(FACTORS, 0.0)
    for order in orders:
        taken: set[str] = set()
        before = _log_speedup(measured, reference, taken)
        for factor in order:
            taken.add(factor)
            after = _log_speedup(measured, reference, taken)
            logs[factor] += (after - before) / len(orders)
            before = after
    return Shortfall(measured, reference, {name: math.exp(log) for name, log in logs.items()})


def if_ideal(measured: Factors) -> dict[str, float]:
    """By factor, the speed-up if that factor alone were ideal and the others as measured.

    A verifying pass or an overhead that is already better than ideal stays as measured.
    """
    return {
        "alpha": replace(measured, alpha=1.0, dependence=1.0).speedup,
        "c": replace(measured, c=0.0).speedup,
        "beta": replace(measured, beta=min(1.0, measured.beta)).speedup,
        "overhead": replace(measured, overhead=min(0.0, measured.overhead)).speedup,
    }


def if_reference(measured: Factors, reference: Factors) -> dict[str, float]:
    """By factor, the speed-up if that factor alone were the reference's and the others as measured.

    Args:
        measured: the factors of a run.
        reference: the factors it is compared with.
    """
    return {
        factor: math.exp(_log_speedup(measured, reference, {*FACTORS} - {factor}))
        for factor in FACTORS
    }


def _log_speedup(measured: Factors, reference: Factors, taken: set[str]) -> float:
    """ln of the speed-up with the factors in ``taken`` as measured and the others as in reference.

    Costs are mixed as times of a round (c γ, β, overhead), so that the two γ may differ. A negative
    overhead measured beside a long verifying pass can exceed the reference's passes; such a mixed
    cost counts as a tenth of the smaller of both costs, since no round takes no time.
    """

    def of(factor: str) -> Factors:
        return measured if factor in taken else reference

    tokens = expected_tokens(of("alpha").alpha, of("alpha").gamma) * of("dependence").dependence
    cost = of("c").c * of("c").gamma + of("beta").beta + of("overhead").overhead
    return math.log(tokens / max(cost, 0.1 * min(measured.cost, reference.cost)))
