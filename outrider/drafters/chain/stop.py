"""Where a draft stops, decided by the draft model's probabilities of its tokens.

    confidence   after x_i once q(x_i) < c
    survival     after x_i once 1 - Π_{j≤i} q(x_j) > θ

Confidence is ``assistant_confidence_threshold`` of ``transformers``. Survival is the form of
SpecDec++ (Huang, Guo and Wang, "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate
Lengths", 2024, https://arxiv.org/abs/2405.19715), whose optimal policy is such a threshold on the
probability that some token will be rejected. They train a head to predict acceptance; here the
draft model's q(x) takes its place.

A stop may depend on drafted tokens because it acts after them: the token that stops the draft
stays in it and is verified, so the output keeps its distribution. (Dropping the token and sampling
from p instead would bias the output.)
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.core.errors import InvalidParameterError


class Stop(Protocol):
    """A rule for where a draft stops."""

    def goes_on(self, q: Tensor, survival: Tensor) -> Tensor:
        """Whether a draft goes on after a token; bool, of the arguments' shape.

        Args:
            q: the draft model's probability of the token; any shape.
            survival: the product of q over the drafted tokens up to this one; the same shape.
        """


@dataclass(frozen=True)
class Confidence:
    """Stops after a token with ``q(x) < threshold``.

    Raises:
        InvalidParameterError: a threshold outside [0, 1].
    """

    threshold: float = 0.4

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InvalidParameterError(
                f"draft_confidence={self.threshold!r}: must be in [0, 1]; 0 never stops early"
            )

    def goes_on(self, q: Tensor, survival: Tensor) -> Tensor:
        return q >= self.threshold


@dataclass(frozen=True)
class Survival:
    """Stops once ``1 - Π q(x) > theta``.

    Raises:
        InvalidParameterError: a theta outside [0, 1].
    """

    theta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.theta <= 1:
            raise InvalidParameterError(
                f"draft_length='survival:{self.theta!r}': must be in [0, 1]; 1 never stops early"
            )

    def goes_on(self, q: Tensor, survival: Tensor) -> Tensor:
        return 1 - survival <= self.theta


@dataclass(frozen=True)
class Both:
    """Stops where either does."""

    one: Stop
    other: Stop

    def goes_on(self, q: Tensor, survival: Tensor) -> Tensor:
        return self.one.goes_on(q, survival) & self.other.goes_on(q, survival)
