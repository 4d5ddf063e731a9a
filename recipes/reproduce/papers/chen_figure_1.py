"""Chen, Borgeaud, Irving, Lespiau, Sifre and Jumper, "Accelerating Large Language Model Decoding
with Speculative Sampling", 2023, figure 1: time of a loop, efficiency and latency by draft length.

https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from recipes.reproduce.effect import Effect, certain, falling, mean, paired, positive
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import (
    counted_time,
    seconds,
    seconds_per_round,
    tokens_per_round,
    values,
)
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table
from recipes.reproduce.subject import Kind

KINDS: tuple[Kind, ...] = ("code", "free")


def measure(lab: Lab) -> Findings:
    """Draft lengths 0 to 7 at temperature 1, on programs and on prose."""
    lengths = lab.choose([1, 4, 7], [1, 2, 3, 4, 5, 6, 7])
    c = lab.cost()
    effects: list[Effect] = []
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {
        name: {} for name in ("time", "efficiency", "speed")
    }
    rows = []
    for kind in KINDS:
        cells = lab.bench(lab.speculative(), data=kind, gammas=lengths, temperatures=[1.0])
        by_length = {K: cells.one("speculative", gamma=K) for K in lengths}
        plain = cells.one("plain")
        per_round = {K: values(cell, tokens_per_round) for K, cell in by_length.items()}
        efficiency = {
            K: {unit: tokens / (K + 1) for unit, tokens in each.items()}
            for K, each in per_round.items()
        }
        speeds = {0: mean(lab.speed(plain, 0, 0))} | {
            K: mean(lab.speed(cell, c, K)) for K, cell in by_length.items()
        }
        times = {
            K: values(cell, seconds if lab.size.timed else counted_time(c, K))
            for K, cell in by_length.items()
        }
        first, last = lengths[0], lengths[-1]
        effects += [
            falling(f"{kind}: tokens per round over K + 1 fall with K", efficiency),
            positive(
                f"{kind}: generations vary more in time at K = {last} than at {first}",
                list(zip(*paired(times[last], times[first]), strict=True)),
                _more_variation,
                "difference of standard deviations {:.3g}",
                expected="few outputs",
            ),
        ]
        loop = {K: 1 + c * K for K in lengths}
        if lab.size.timed:
            loop = {K: mean(values(cell, seconds_per_round)) for K, cell in by_length.items()}
            fit = _r_squared(loop)
            effects.append(
                certain(f"{kind}: time of a loop is linear in K", f"R² {fit:.3f}", fit > 0.9)
            )
        lines["time"][kind] = list(loop.items())
        lines["efficiency"][kind] = [(K, mean(each)) for K, each in efficiency.items()]
        lines["speed"][kind] = list(speeds.items())
        for K in lengths:
            spread = statistics.pstdev(times[K].values())
            rows.append(
                [
                    f"{kind}, K = {K}",
                    f"{loop[K]:.3g}",
                    f"{mean(per_round[K]):.2f}",
                    f"{mean(efficiency[K]):.3f}",
                    f"{speeds[K] / speeds[0]:.2f}×",
                    f"{spread:.3g}",
                ]
            )
        best = max(speeds, key=lambda K: speeds[K])
        rows.append(
            [f"{kind}: fastest at K = {best}", "", "", "", f"{speeds[best] / speeds[0]:.2f}×", ""]
        )
    unit = "seconds" if lab.size.timed else "counted target passes"
    head = ["", f"loop, {unit}", "tokens per round", "÷ (K + 1)", "speed-up", "deviation of times"]
    figures = [
        Figure("Time of a loop", "K", unit, lines["time"]),
        Figure("Efficiency", "K", "tokens per round ÷ (K + 1)", lines["efficiency"]),
        Figure("Speed", "K", lab.unit_of_speed, lines["speed"]),
    ]
    return Findings(effects, [Table("By draft length", head, rows)], figures)


def _more_variation(pairs: Sequence[tuple[float, float]]) -> float:
    long, short = zip(*pairs, strict=True)
    return statistics.pstdev(long) - statistics.pstdev(short)


def _r_squared(line: dict[int, float]) -> float:
    xs, ys = np.array(list(line)), np.array(list(line.values()))
    rest = ys - np.polyval(np.polyfit(xs, ys, 1), xs)
    return float(1 - rest.var() / ys.var())


RECIPE = Recipe(
    "chen-figure-1",
    "Draft length: time, efficiency and variance",
    "Chen et al., 2023, figure 1",
    "The time of a loop is linear in K, tokens per round over K + 1 fall, and the times of whole "
    "generations vary more as K grows; prose has its optimum at K = 3.",
    measure,
)
