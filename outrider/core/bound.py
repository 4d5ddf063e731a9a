"""What a verification rule preserves: in words, and as a number that tests can check."""

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["kl", "rkl", "tv", "chi2"]
"""A divergence between the target distribution p and the output distribution π: KL(p‖π), KL(π‖p),
total variation ½Σ|p-π|, or χ²(p‖π) = Σ p²/π - 1."""


@dataclass(frozen=True)
class Bound:
    """What a rule preserves.

    Attributes:
        words: one line for people to read.
        divergence: what ``per_token`` measures; None if no divergence is bounded.
        per_token: upper bound on the divergence between target and output at any position.
        threshold: for rules that bound no divergence, the threshold that accepted tokens meet.
    """

    words: str
    divergence: Divergence | None = None
    per_token: float | None = None
    threshold: float | None = None

    @property
    def lossless(self) -> bool:
        return self.per_token == 0

    def per_sequence(self, num_tokens: int) -> float | None:
        """The bound on the same divergence for whole sequences of ``num_tokens`` tokens.

        Both KL divergences add up along a sequence (chain rule). For total variation, two sequences
        drawn by the best coupling stay equal at each position with probability at least 1 - D. For
        χ², the factors 1 + χ² multiply.
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
