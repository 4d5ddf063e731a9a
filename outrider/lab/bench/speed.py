"""What a cell's repeats say about its speed.

Definitions:

    tokens per second      tokens of all outputs over the seconds of all batches, prefill included
    time to first token    from the start of a request's batch to the end of its first round
    time between rounds    from the end of one of a request's rounds to the end of its next: what a
                           reader of a stream waits for the next piece
    inter-token latency    the time between rounds divided by the tokens of the later round, counted
                           once per token: tokens of one round arrive together
    time of a generation   from the start of a request's batch to its last token; its standard
                           deviation is over all requests of all repeats (Chen et al., 2023, fig. 1)

Acceptance rate, acceptance length and α are those of ``engine/stats.py``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from outrider.engine import Stats
from outrider.lab.bench.record import Repeat, RequestRecord
from outrider.lab.bench.token_classes import TokenClasses, acceptance_by_class
from outrider.lab.data import Example


def speed_of(
    repeats: Sequence[Repeat], examples: Sequence[Example], classes: TokenClasses | None
) -> dict[str, Any]:
    """The speed of a cell, as JSON; times in seconds.

    Args:
        repeats: at least one.
        examples: of the data set.
        classes: of the target's vocabulary; None leaves out the acceptance by token class.
    """
    requests = [request for repeat in repeats for request in repeat.requests]
    gaps = [gap for request in requests for gap in _gaps(request)]
    total = Stats.total(request.total() for request in requests)
    generation = [request.seconds for request in requests]
    outputs = [(request.token_ids, request.origins) for request in requests]
    return {
        "tokens_per_second": tokens_per_second(repeats),
        "tokens": sum(repeat.tokens for repeat in repeats),
        "seconds": sum(repeat.seconds for repeat in repeats),
        "first_token_seconds": percentiles(request.round_seconds[0] for request in requests),
        "between_rounds_seconds": percentiles(gap for gap, _ in gaps),
        "inter_token_seconds": percentiles(
            gap / tokens for gap, tokens in gaps for _ in range(tokens)
        ),
        "generation_seconds": percentiles(generation)
        | {"deviation": statistics.stdev(generation) if len(generation) > 1 else 0.0},
        "round_seconds": _mean(gap for gap, _ in gaps),
        **acceptance_of(total),
        "acceptance_by_position": total.acceptance_by_position,
        "tried_at": total.tried_at,
        "acceptance_by_class": {} if classes is None else acceptance_by_class(classes, outputs),
        "time_split": time_split(total),
        "by_task": _by_task(requests, examples),
    }


def tokens_per_second(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """The speed over all repeats, and in each."""
    each = [repeat.tokens_per_second for repeat in repeats]
    tokens = sum(repeat.tokens for repeat in repeats)
    return {
        "mean": tokens / sum(repeat.seconds for repeat in repeats),
        "median": statistics.median(each),
        "lowest": min(each),
        "highest": max(each),
        "repeats": each,
    }


def acceptance_of(total: Stats) -> dict[str, Any]:
    """Counts of rounds and tokens, and what follows from them."""
    return {
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_length": total.acceptance_length,
        "alpha": total.alpha if total.drafted else None,
    }


def time_split(total: Stats) -> dict[str, float]:
    """Shares of the time: forward passes of draft and target, prefill included; the rest."""
    whole = total.seconds or 1.0
    return {
        "draft": total.draft_seconds / whole,
        "target": total.target_seconds / whole,
        "other": total.other_seconds / whole,
    }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """Mean, p50, p90 and p99; all None where there is no value."""
    listed = list(values)
    if not listed:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(listed, [50, 90, 99])
    return {"mean": _mean(listed), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _gaps(request: RequestRecord) -> list[tuple[float, int]]:
    """Seconds between a request's rounds, each with the tokens of the later round."""
    ends = request.round_seconds
    pairs = zip(ends, ends[1:], request.round_tokens[1:], strict=False)
    return [(end - begin, tokens) for begin, end, tokens in pairs]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return statistics.fmean(listed) if listed else None


def _by_task(requests: Sequence[RequestRecord], examples: Sequence[Example]) -> dict[str, Any]:
    """The speed of each task. A request's seconds are its share of its batch's, as the engine
    divides them."""
    by_task: dict[str, list[RequestRecord]] = defaultdict(list)
    for request in requests:
        by_task[examples[request.example].task].append(request)
    if by_task.keys() <= {""}:
        return {}
    found = {}
    for task, records in by_task.items():
        total = Stats.total(record.total() for record in records)
        found[task] = {"tokens_per_second": total.tokens_per_second, **acceptance_of(total)}
    return found
