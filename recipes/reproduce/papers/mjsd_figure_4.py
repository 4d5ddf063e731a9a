"""MJSD (Qin et al., 2024), figure 4: speed and perplexity by the threshold τ.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from recipes.reproduce.effect import falling, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import accepted_per_round, nats, values
from recipes.reproduce.papers.mjsd_table_2 import GAMMA, MODELS, sampled
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table


def measure(lab: Lab) -> Findings:
    """τ from 0 to 1 with 8 beams."""
    thresholds = lab.choose([0.0, 0.5, 1.0], [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
    cells = sampled(lab, *(f"mjsd:beams=8,threshold={t:g},label=τ {t:g}" for t in thresholds))
    by_tau = {t: cells.one(f"τ {t:g}") for t in thresholds}
    c = lab.cost()
    speeds = {t: lab.speed(cell, c, GAMMA) for t, cell in by_tau.items()}
    middle = 0.5
    effects = [
        falling("speed falls with τ", speeds),
        greater(
            "log perplexity at τ = 1 exceeds that at 0.5", nats(by_tau[1.0]), nats(by_tau[middle])
        ),
    ]
    if lab.size.timed:
        plain = nats(cells.one("plain"))
        effects.append(greater("τ = 0 still is below sampling", plain, nats(by_tau[0.0])))
    rows = [
        [
            f"{t:g}",
            f"{mean(nats(cell)):.3f}",
            f"{mean(values(cell, accepted_per_round)):.2f}",
            f"{mean(speeds[t]) / mean(lab.speed(cells.one('plain'), 0, 0)):.2f}×",
        ]
        for t, cell in by_tau.items()
    ]
    head = ["τ", "nats per token", "accepted per round", "speed-up"]
    figures = [
        Figure(
            "Speed by threshold",
            "τ",
            lab.unit_of_speed,
            {"MJSD": [(t, mean(v)) for t, v in speeds.items()]},
        ),
        Figure(
            "Perplexity by threshold",
            "τ",
            "nats per token",
            {"MJSD": [(t, mean(nats(cell))) for t, cell in by_tau.items()]},
        ),
    ]
    return Findings(
        effects,
        [Table("8 beams, γ 4", head, rows)],
        figures,
        ["At τ = 1 nothing is accepted, and the method is sampling with wasted drafts."],
    )


RECIPE = Recipe(
    "mjsd-figure-4",
    "MJSD: the threshold",
    "Qin et al. (MJSD), 2024, figure 4",
    "Speed falls with τ; the perplexity is flat from 0.1 to 0.9 and rises near 1; τ = 0 works.",
    measure,
    MODELS,
)
