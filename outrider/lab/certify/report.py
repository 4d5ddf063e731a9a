"""The certificate: one line per check, and a verdict that claims only what the checks show."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FALSE_ALARM = 1e-3
"""Upper bound on the probability that the statistical checks together reject a correct method."""
STATISTICAL_CHECKS = 4
"""The checks that share it equally: drafts, tokens, outputs, and rounds where they are sampled."""
POWER = 0.99
"""Probability with which a reported detectable deviation would have been found."""
_BOUNDED = ("positions", "rounds")  # checks that hold a lossy rule to its bound


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: of the check.
        passed: None if the check was skipped, or only reports a number.
        number: the measured number; None if there is none.
        words: what the number is, over how many samples, and its limit.
        claim: what the check shows unless it fails; part of the verdict.
    """

    name: str
    passed: bool | None
    number: float | None
    words: str
    claim: str = ""

    @classmethod
    def skipped(cls, name: str, why: str) -> "Check":
        return cls(name, None, None, why)

    @property
    def mark(self) -> str:
        return {True: "pass", False: "FAIL", None: "-"}[self.passed]


@dataclass(frozen=True)
class Certificate:
    """The outcome of :func:`outrider.lab.certify.certify`.

    Attributes:
        rule: name of the verification rule.
        claim: what the rule states that it preserves.
        lossless: whether it claims to preserve the target's distribution.
        greedy: whether the settings always take the most probable token.
        checks: in the order in which they ran.
    """

    rule: str
    claim: str
    lossless: bool
    greedy: bool
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        failed = [check for check in self.checks if check.passed is False]
        if failed:
            head = "NOT LOSSLESS" if self.lossless else "NOT AS CLAIMED"
            which = ", ".join(check.name for check in failed)
            return f"{head}: {self.rule} fails {which}; its claim is '{self.claim}'."
        shown = "; ".join(check.claim for check in self.checks if check.claim)
        if not shown:
            return f"INCONCLUSIVE: no check failed for {self.rule}, but none showed anything."
        if self.lossless:
            return f"LOSSLESS as far as tested: {shown}."
        if any(check.passed and check.name in _BOUNDED for check in self.checks):
            return f"AS CLAIMED ('{self.claim}') as far as tested: {shown}."
        return f"LOSSY WITHOUT A BOUND that could be tested ('{self.claim}'): {shown}."

    def as_dict(self) -> dict[str, Any]:
        """The certificate as a JSON document."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "rule": self.rule,
            "claim": self.claim,
            "lossless": self.lossless,
            "greedy": self.greedy,
            "false_alarm": FALSE_ALARM,
            "checks": [asdict(check) for check in self.checks],
        }


def rounded_up(x: float) -> str:
    """The number in two digits, rounded up, since an upper bound must not be rounded down."""
    if x <= 0 or not math.isfinite(x):
        return f"{x:g}"
    exponent = math.floor(math.log10(x)) - 1
    return f"{math.ceil(round(x / 10.0**exponent, 6)) * 10.0**exponent:.2g}"
