"""The speed-up of speculative decoding: predicted by formula, and measured.

Leviathan, Kalman and Matias, ICML 2023, Theorem 3.8, with the cost β of a wider target pass:

    speed-up = E / (c γ + β),   E = (1 - α^(γ+1)) / (1 - α)

c is the time of a draft pass, and β the time of a target pass over γ + 1 tokens, both relative to a
target pass over one token. E assumes that tokens are accepted independently with the same α. In
real sequences, easy and hard parts differ; since E is convex in α, more tokens are accepted than E
says. The formula with the measured tokens per round in place of E is therefore the stricter
standard. Both are reported. ``lab.analysis`` has the formulas.

Both formulas count forward passes only, for speculative and for plain decoding.
"""

from dataclasses import asdict, dataclass
from typing import Any

from outrider.lab.analysis.tokens_per_round import expected_tokens


@dataclass(frozen=True)
class SpeedUp:
    """The measured speed-up and what the formula needs.

    Attributes:
        measured: tokens per second relative to plain decoding.
        alpha: α, measured.
        gamma: drafted tokens per round, on average.
        tokens: emitted tokens per round, measured.
        draft: cγ, the draft passes of a round in units of a target pass over one token.
        c: one draft pass in the same units; 0 without a draft model.
        beta: β, the round's target pass in the same units.
        chain: whether all drafts are chains, for which E holds.
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
    def expected_tokens(self) -> float | None:
        """E from α; None for trees."""
        if not self.chain:
            return None
        return expected_tokens(min(self.alpha, 1.0), self.gamma)  # α may exceed 1 by rounding

    @property
    def by_alpha(self) -> float | None:
        """The formula with E from α; None for trees."""
        tokens = self.expected_tokens
        return None if tokens is None else tokens / (self.draft + self.beta)

    @property
    def by_tokens(self) -> float:
        """The formula with the measured tokens per round."""
        return self.tokens / (self.draft + self.beta)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as a JSON document."""
        by_alpha = self.by_alpha
        return {
            **asdict(self),
            "expected_tokens": self.expected_tokens,
            "by_alpha": by_alpha,
            "by_tokens": self.by_tokens,
            "reached_by_alpha": None if by_alpha is None else self.measured / by_alpha,
            "reached_by_tokens": self.measured / self.by_tokens,
        }
