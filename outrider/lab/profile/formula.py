"""What speculative decoding should gain, by the formula; and what it did.

Leviathan, Kalman and Matias, ICML 2023, Theorem 3.8, with the cost of a wider target pass:

    speed-up = E / (c γ + β),   E = (1 - α^(γ+1)) / (1 - α)

c is the time of a draft pass and β that of the target's pass over γ + 1 tokens, both over that of
its pass over one token. E assumes that tokens are accepted independently of each other. They are
not, and E is convex in α, so texts of easy and hard parts keep more than that: the measured tokens
per round, in place of E, is the honester standard for what passes cost. Both are here.

Neither counts anything but passes, on neither side.
"""

from dataclasses import asdict, dataclass
from typing import Any


def expected_tokens(alpha: float, gamma: float) -> float:
    """E, tokens per round if every token is accepted with probability α, whatever came before."""
    if alpha >= 1:
        return gamma + 1
    return float((1 - alpha ** (gamma + 1)) / (1 - alpha))


@dataclass(frozen=True)
class SpeedUp:
    """Measured and by formula.

    Attributes:
        measured: tokens per second over plain decoding's.
        alpha: α, measured.
        gamma: drafted tokens per round, on average.
        tokens: emitted tokens per round, measured.
        draft: passes of draft models per round, in target passes over one token: cγ.
        c: a draft pass over a target pass over one token; 0 without a draft model.
        beta: β of the round's target pass.
        chain: whether drafts are chains, which E is about.
    """

    measured: float
    alpha: float
    gamma: float
    tokens: float
    draft: float
    c: float
    beta: float
    chain: bool

    @property
    def by_alpha(self) -> float | None:
        """The formula with E of α; None for trees."""
        if not self.chain:
            return None
        return expected_tokens(self.alpha, self.gamma) / (self.draft + self.beta)

    @property
    def by_tokens(self) -> float:
        """The formula with the measured tokens per round."""
        return self.tokens / (self.draft + self.beta)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        by_alpha = self.by_alpha
        return {
            **asdict(self),
            "expected_tokens": expected_tokens(self.alpha, self.gamma) if self.chain else None,
            "by_alpha": by_alpha,
            "by_tokens": self.by_tokens,
            "reached_by_alpha": None if by_alpha is None else self.measured / by_alpha,
            "reached_by_tokens": self.measured / self.by_tokens,
        }
