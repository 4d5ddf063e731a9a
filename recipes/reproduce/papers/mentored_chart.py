"""Tran-Thien, "An Optimal Lossy Variant of Speculative Decoding", 2023: speed and quality over the
budget D and the draft length γ.

https://vivien000.github.io/blog/journal/a-provably-optimal-lossy-variant-of-speculative-decoding.html
"""

from __future__ import annotations

import math

from outrider.lab.bench import CellResult
from recipes.reproduce.blame import Rivals, against
from recipes.reproduce.downstream import BLEU, downstream
from recipes.reproduce.effect import Effect, certain, greater, mean, rising
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import nats, tokens_per_round, values
from recipes.reproduce.recipe import Figure, Findings, PaperModels, Recipe, Table

TEMPERATURE = 0.3


def measure(lab: Lab) -> Findings:
    """D in {0, 0.1, 0.15, 0.2}; D = 0 is speculative decoding."""
    budgets = lab.choose([0.1, 0.2], [0.1, 0.15, 0.2])
    gammas = lab.choose([5], [3, 5, 7, 9])
    methods = [f"mentored:budget={D:g},label=D = {D:g}" for D in budgets]
    cells = lab.bench(
        "speculative",
        *methods,
        gammas=gammas,
        temperatures=[TEMPERATURE],
        metrics=["divergence", "perplexity"],
    )
    c = lab.cost()
    plain = cells.one("plain")
    effects: list[Effect] = []
    rivals: list[Rivals] = []
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {"speculative": []}
    lines |= {f"D = {D:g}": [] for D in budgets}
    for gamma in gammas:
        by_budget = {0.0: cells.one("speculative", gamma=gamma)}
        by_budget |= {D: cells.one(f"D = {D:g}", gamma=gamma) for D in budgets}
        speeds = {D: lab.speed(cell, c, gamma) for D, cell in by_budget.items()}
        effects += [
            rising(f"γ = {gamma}: speed grows with D", speeds, expected="few outputs"),
            greater(
                f"γ = {gamma}: speculative faster than sampling",
                speeds[0.0],
                lab.speed(plain, 0, 0),
            ),
        ]
        worst = max(_tv(cell) / math.sqrt(D / 2) for D, cell in by_budget.items() if D)
        effects.append(
            certain(
                f"γ = {gamma}: the measured total variation per token is below √(D / 2)",
                f"at most {worst:.0%} of it",
                0 < worst <= 1,
            )
        )
        most = f"D = {budgets[-1]:g}, γ {gamma}"
        rivals.append(Rivals(most, by_budget[budgets[-1]], "speculative", by_budget[0.0], plain))
        for D, cell in by_budget.items():
            name = f"D = {D:g}" if D else "speculative"
            lines[name].append((gamma, mean(speeds[D])))
            rows.append(
                [
                    f"{name}, γ {gamma}",
                    f"{mean(values(cell, tokens_per_round)):.2f}",
                    f"{mean(speeds[D]) / mean(lab.speed(plain, 0, 0)):.2f}×",
                    f"{_tv(cell):.4f}",
                    f"{mean(nats(cell)):.3f}",
                ]
            )
    rows.append(["sampling", "1.00", "1.00×", "0", f"{mean(nats(plain)):.3f}"])
    middle = 5
    tables, missing = downstream(
        lab, (BLEU,), ["speculative", *methods], gammas=[middle], temperatures=[TEMPERATURE]
    )
    causes, shortfalls = against(lab, rivals)
    head = ["", "tokens per round", "speed-up", "measured TV per token", "nats per token"]
    figure = Figure("Mentored decoding", "γ", lab.unit_of_speed, lines)
    return Findings(
        effects,
        [Table(f"Temperature {TEMPERATURE:g}", head, rows), *tables, *causes],
        [figure] if len(gammas) > 1 else [],
        [
            "The author's quality is BLEU of translations by T5; beside it, the log perplexity of "
            "the outputs under the target is measured at every D and γ. The author's code stops "
            "anywhere between 0.8 D and 1.2 D; here D is never exceeded, so that the total "
            "variation stays below √(D / 2) (Pinsker's inequality). The KL itself is measured at "
            "single positions, by the recipe "
            "mentored-curve: in float32 and at this temperature a sum of it overflows.",
            *missing,
        ],
        shortfalls,
    )


def _tv(cell: CellResult) -> float:
    found: float = cell.metrics["divergence"]["tv"]
    return found


RECIPE = Recipe(
    "mentored-chart",
    "Mentored decoding: speed by budget and draft length",
    "Tran-Thien, 2023, speed and BLEU over D and γ",
    "Tokens per second: sampling < speculative < D = 0.1 < 0.15 < 0.2; BLEU is flat at 0.1 and "
    "falls after.",
    measure,
    PaperModels("google-t5/t5-large", ("google-t5/t5-small",)),
)
