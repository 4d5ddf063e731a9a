"""What a simulation finds: counts, and times of requests in histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BINS_PER_E = 100  # of the histogram of times: its quantiles are within 1 %
_SHORTEST = 1e-4  # seconds
_NUM_BINS = 2400


class Histogram:
    """Times in bins of equal ratio, for quantiles of any number of values."""

    def __init__(self) -> None:
        self.counts = np.zeros(_NUM_BINS, np.int64)
        self.total, self.num = 0.0, 0

    def add(self, seconds: NDArray[np.float64]) -> None:
        """Adds values."""
        bins = np.log(np.maximum(seconds, _SHORTEST) / _SHORTEST) * _BINS_PER_E
        at = np.minimum(bins.astype(np.int64), _NUM_BINS - 1)
        self.counts += np.bincount(at, minlength=_NUM_BINS)
        self.total += float(seconds.sum())
        self.num += len(seconds)

    @property
    def mean(self) -> float:
        """The mean, exactly; NaN without values."""
        return self.total / self.num if self.num else math.nan

    def quantile(self, share: float) -> float:
        """A quantile within 1 %; below 0.1 ms it is 0. NaN without values."""
        if not self.num:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.counts), share * self.num))
        return _SHORTEST * math.exp((at + 0.5) / _BINS_PER_E) if at else 0.0

    def as_dict(self) -> dict[str, float]:
        """Mean and quantiles as JSON."""
        return {
            "mean": self.mean,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
        }


@dataclass
class Simulated:
    """What happened.

    Attributes:
        seconds: simulated time, without the warm-up.
        arrived, finished, rejected: requests; those that a failure interrupted arrive once.
        restarted: requests that failures interrupted.
        failures: of replicas.
        tokens: of finished requests.
        row_seconds: time integral of the number of running requests.
        waiting_seconds: time integral of the number of waiting requests.
        busy_seconds: time integral of the number of replicas with a running request.
        request, first_token, wait: times of requests; one that was restarted has a wait, and
            a time to its first token, of each start.
        per_token: time from the end of the prefill to that of the request, over its tokens.
        hours: by hour of the simulated time: requests per second, and mean running rows of a
            replica.
    """

    seconds: float = 0.0
    arrived: int = 0
    finished: int = 0
    rejected: int = 0
    restarted: int = 0
    failures: int = 0
    tokens: float = 0.0
    row_seconds: float = 0.0
    waiting_seconds: float = 0.0
    busy_seconds: float = 0.0
    request: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    wait: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)
    hours: list[dict[str, float]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        names = ("seconds", "arrived", "finished", "rejected", "restarted", "failures", "tokens")
        times = ("request", "first_token", "wait", "per_token")
        return {
            **{name: getattr(self, name) for name in names},
            "mean_rows": self.row_seconds / self.seconds,
            "mean_waiting": self.waiting_seconds / self.seconds,
            "mean_busy": self.busy_seconds / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            **{name: getattr(self, name).as_dict() for name in times},
            "hours": self.hours,
        }
