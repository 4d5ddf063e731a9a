"""Numbers of single outputs of a benchmark's cells, for effects to compare."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

from outrider.lab.bench import CellResult, RequestRecord
from recipes.reproduce.effect import Unit, Values

Number = Callable[[RequestRecord], float | None]
"""A number of an output; None where it is not defined."""


def values(cell: CellResult, number: Number) -> Values:
    """A number of each output. At temperature 0 all repeats give the same output, so that it counts
    once, with the mean of its numbers."""
    found: dict[Unit, list[float]] = defaultdict(list)
    for repeat in cell.repeats:
        for request in repeat.requests:
            value = number(request)
            if value is not None:
                found[_unit(cell, repeat.number, request)].append(value)
    return {unit: fmean(each) for unit, each in found.items()}


def accepted_per_round(request: RequestRecord) -> float | None:
    """Accepted tokens per target pass."""
    total = request.total()
    return total.accepted / total.rounds if total.rounds else None


def tokens_per_round(request: RequestRecord) -> float | None:
    """Emitted tokens per target pass."""
    total = request.total()
    return total.acceptance_length if total.rounds else None


def alpha(request: RequestRecord) -> float | None:
    """Leviathan's α."""
    total = request.total()
    return total.alpha if total.reached else None


def acceptance_rate(request: RequestRecord) -> float | None:
    """Accepted over drafted tokens."""
    total = request.total()
    return total.acceptance_rate if total.drafted else None


def tokens_per_second(request: RequestRecord) -> float | None:
    """Of a request that ran alone in its batch."""
    return len(request.token_ids) / request.seconds if request.seconds else None


def seconds_per_round(request: RequestRecord) -> float | None:
    """Of the rounds after the first, which contains the prefill."""
    ends = request.round_seconds
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def seconds(request: RequestRecord) -> float | None:
    """Of the whole generation."""
    return request.seconds


def counted_speed(c: float, passes: float) -> Number:
    """Tokens per unit of time, where a target pass takes 1 and a draft pass c.

    Args:
        c: time of a draft pass over that of a target pass.
        passes: draft passes of a round.
    """

    def number(request: RequestRecord) -> float | None:
        total = request.total()
        return total.emitted / (total.rounds * (1 + c * passes)) if total.rounds else None

    return number


def counted_time(c: float, passes: float) -> Number:
    """Time of a generation per token in the same units."""

    def number(request: RequestRecord) -> float | None:
        total = request.total()
        return total.rounds * (1 + c * passes) / total.emitted if total.emitted else None

    return number


def metric_values(cell: CellResult, metric: str, name: str) -> Values:
    """A metric of each output, as the benchmark computed it."""
    listed = cell.metrics[metric]["each"][name]
    requests = [(repeat.number, request) for repeat in cell.repeats for request in repeat.requests]
    found: dict[Unit, float] = {}
    for (repeat, request), value in zip(requests, listed, strict=False):  # one run, or all repeats
        if math.isfinite(float(value)):
            found[_unit(cell, repeat, request)] = float(value)
    return found


def nats(cell: CellResult) -> Values:
    """Mean negative log-probability per token under the target: log perplexity of each output."""
    return metric_values(cell, "perplexity", "nats_per_token")


def _unit(cell: CellResult, repeat: int, request: RequestRecord) -> Unit:
    return (repeat if cell.cell.temperature else 0, request.example, request.turn)
