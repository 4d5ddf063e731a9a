"""What a certificate says: one line per check, and a verdict that claims no more than they show."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FALSE_ALARM = 1e-3
"""Probability, at most, that the statistical checks together reject a right method."""
STATISTICAL_CHECKS = 4
"""Each of them takes its share: draws, places, texts, and frequencies where ENUM cannot go."""
POWER = 0.99
_BOUNDED = ("positions", "rounds")  # checks that hold a lossy rule to its bound


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Attributes:
        name: what was looked at.
        passed: None when the question does not arise, or its answer is not held against anything.
        number: the answer as a number; None if there is none.
        words: what the number is, over how much, and what it was held against.
        claim: what the check shows if it does not fail; part of the verdict.
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
        claim: what the rule says that it preserves.
        lossless: whether it claims to preserve the target's distribution.
        greedy: whether the settings take the most probable token always.
        checks: in the order they were run.
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
        """One sentence for people."""
        failed = [check for check in self.checks if check.passed is False]
        if failed:
            head = "NOT LOSSLESS" if self.lossless else "NOT AS CLAIMED"
            which = ", ".join(check.name for check in failed)
            return f"{head}: {self.rule} fails {which}; its claim is '{self.claim}'."
        shown = "; ".join(check.claim for check in self.checks if check.claim)
        if not shown:
            return f"NOTHING FOUND against {self.rule}, and nothing shown for it either."
        if self.lossless:
            return f"LOSSLESS as far as tested: {shown}."
        if any(check.passed and check.name in _BOUNDED for check in self.checks):
            return f"AS CLAIMED ('{self.claim}') as far as tested: {shown}."
        return f"LOSSY WITHOUT A BOUND that could be tested ('{self.claim}'): {shown}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Two digits, rounded up: a bound must not be rounded down."""
    if x <= 0 or not math.isfinite(x):
        return f"{x:g}"
    exponent = math.floor(math.log10(x)) - 1
    return f"{math.ceil(round(x / 10.0**exponent, 6)) * 10.0**exponent:.2g}"
