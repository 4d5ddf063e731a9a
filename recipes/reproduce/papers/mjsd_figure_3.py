"""MJSD (Qin et al., 2024), figure 3: accepted length against speculative decoding, by γ.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from recipes.reproduce.effect import Effect, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import accepted_per_round, values
from recipes.reproduce.papers.mjsd_table_2 import MJSD, MODELS, WARP
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table


def measure(lab: Lab) -> Findings:
    """Accepted tokens per round of both methods."""
    gammas = lab.choose([4], [2, 4, 6, 8])
    cells = lab.bench(
        "speculative", MJSD, gammas=gammas, temperatures=[1.0], metrics=["perplexity"], **WARP
    )
    rows, effects = [], list[Effect]()
    lines: dict[str, list[tuple[float, float]]] = {"MJSD": [], "speculative": []}
    for gamma in gammas:
        joint, single = (
            values(cells.one(name, gamma=gamma), accepted_per_round)
            for name in ("MJSD", "speculative")
        )
        effects.append(greater(f"γ = {gamma}: MJSD accepts more per round", joint, single))
        ratio = f"{mean(joint) / mean(single):.2f}×" if mean(single) else "–"
        rows.append([str(gamma), f"{mean(single):.2f}", f"{mean(joint):.2f}", ratio])
        lines["MJSD"].append((gamma, mean(joint)))
        lines["speculative"].append((gamma, mean(single)))
    head = ["γ", "speculative", "MJSD", "ratio"]
    figure = Figure("Accepted tokens per round", "γ", "accepted tokens", lines)
    return Findings(
        effects,
        [Table("Accepted tokens per round", head, rows)],
        [figure] if len(gammas) > 1 else [],
        ["The paper: 2.15× at γ = 4."],
    )


RECIPE = Recipe(
    "mjsd-figure-3",
    "MJSD: accepted length",
    "Qin et al. (MJSD), 2024, figure 3",
    "At γ = 4 MJSD accepts 2.15 times as many tokens as speculative decoding.",
    measure,
    MODELS,
)
