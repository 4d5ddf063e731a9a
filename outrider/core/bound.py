"""What a verification rule preserves: in words, and as a number that can be checked."""

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["kl", "rkl", "tv", "chi2"]
"""Between the target's distribution p and the distribution π that is emitted: KL(p‖π), KL(π‖p),
total variation ½Σ|p-π|, and χ²(p‖π) = Σ p²/π - 1."""


@dataclass(frozen=True)
class Bound:
    """What a rule preserves.

    Attributes:
        words: for people, one line.
        divergence: what ``per_token`` measures; None if no divergence is bounded.
        per_token: the divergence between target and output that no place exceeds.
        threshold: for rules that bound no divergence, the number that accepted tokens keep to.
    """

    words: str
    divergence: Divergence | None = None
    per_token: float | None = None
    threshold: float | None = None

    @property
    def lossless(self) -> bool:
        return self.per_token == 0

    def per_sequence(self, num_tokens: int) -> float | None:
        """The same divergence between the distributions of whole texts of ``num_tokens`` tokens.

        Both KL divergences add up along a text (chain rule). Total variation: texts drawn from
        the two distributions by the best coupling stay equal at each place with probability 1 - D.
        Of χ² it is 1 + χ² that multiplies.
        """
        if self.per_token is None:
            return None
        D = self.per_token
        if self.divergence == "tv":
            return float(1 - (1 - min(D, 1.0)) ** num_tokens)
        if self.divergence == "chi2":
            return float((1 + D) ** num_tokens - 1)
        return num_tokens * D


LOSSLESS = Bound("lossless: the target's distribution, exactly", "tv", 0.0)
