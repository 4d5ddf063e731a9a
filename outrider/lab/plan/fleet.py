"""What a simulation is given: a fleet of replicas, and the traffic that is asked of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_at_least, check_count

DAY = 86400.0


@dataclass(frozen=True)
class Fleet:
    """What serves.

    Attributes:
        replicas: how many.
        row_rates: tokens per second of each row, of batches of 1, 2, … rows.
        prefill_seconds: of a prompt; it interrupts the rounds of the other rows.
        round_seconds: of batches of 1, 2, … rows, added to the time to the first token; without
            them, a request's first token comes with its prefill.
        queue: most requests that wait at a replica; more are rejected.
        mean_time_to_failure: of a replica, in seconds; infinite without failures.
        repair_seconds: from a failure until the replica serves again. Its requests start anew
            elsewhere.
        routing: ``random``, or ``two choices``: the less loaded of two random replicas
            (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001).

    Raises:
        InvalidParameterError: a number outside its range.
    """

    replicas: int
    row_rates: Sequence[float]
    prefill_seconds: float = 0.0
    round_seconds: Sequence[float] = ()
    queue: int = 256
    mean_time_to_failure: float = math.inf
    repair_seconds: float = 300.0
    routing: Literal["random", "two choices"] = "two choices"

    def __post_init__(self) -> None:
        check_count("replicas", self.replicas, 1)
        check_count("queue", self.queue, 0)
        check_at_least("prefill_seconds", self.prefill_seconds, 0)
        check_at_least("repair_seconds", self.repair_seconds, 0)
        if not self.mean_time_to_failure > 0:
            raise InvalidParameterError(
                f"mean_time_to_failure={self.mean_time_to_failure!r}: must be above 0"
            )
        if not self.row_rates or min(self.row_rates) <= 0:
            raise InvalidParameterError("row_rates: must be above 0, one per batch size from 1")
        if self.round_seconds and len(self.round_seconds) != len(self.row_rates):
            raise InvalidParameterError("round_seconds: must be as many as row_rates")


@dataclass(frozen=True)
class Traffic:
    """What is asked of the fleet.

    Attributes:
        load: requests per second, the mean over a day.
        output_tokens: mean length of the outputs.
        lengths: ``exponential`` or ``constant``.
        swing: how far the load goes above and below its mean over a day, as a share of it.
        peak: hour of the day with the highest load.

    Raises:
        InvalidParameterError: a number outside its range.
    """

    load: float
    output_tokens: float
    lengths: Literal["exponential", "constant"] = "exponential"
    swing: float = 0.0
    peak: float = 14.0

    def __post_init__(self) -> None:
        check_at_least("load", self.load, math.ulp(0.0))
        check_at_least("output_tokens", self.output_tokens, 1)
        if not 0 <= self.swing <= 1:
            raise InvalidParameterError(f"swing={self.swing!r}: must be from 0 to 1")

    def at(self, seconds: float) -> float:
        """Requests per second at a time of the day."""
        phase = 2 * math.pi * (seconds - self.peak * 3600) / DAY
        return self.load * (1 + self.swing * math.cos(phase))
