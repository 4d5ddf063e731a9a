"""Tokens per second of engines that differ in their KV buffers, in interleaved repeats."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from outrider import Engine, Sampling, Stats


@dataclass(frozen=True)
class Task:
    """A prompt with its sampling parameters."""

    prompt: tuple[int, ...]
    sampling: Sampling


def gain(engines: dict[str, Engine], work: list[Task], repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens per second of each method, and its ratio to plain, repeat by repeat."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    stats: dict[str, list[Stats]] = {name: [] for name in engines}
    for repeat in range(-1, repeats):  # the first is warm-up, with one prompt only
        names = list(engines)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            began = time.perf_counter()
            done = [
                engines[name].generate([task.prompt], task.sampling).stats
                for task in (work if repeat >= 0 else work[:1])
            ]
            seconds = time.perf_counter() - began
            if repeat >= 0:
                stats[name] += done
                speeds[name].append(sum(each.emitted for each in done) / seconds)
    rows = {}
    for name, found in speeds.items():
        ratios = [mine / plain for mine, plain in zip(found, speeds["plain"], strict=True)]
        total = Stats.total(stats[name])
        rows[name] = {
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(ratios),
            "smallest_ratio": min(ratios),
            "largest_ratio": max(ratios),
            "acceptance_length": total.acceptance_length,
            "acceptance_rate": total.acceptance_rate,
            "other_share": total.other_seconds / total.seconds,
        }
    return rows
