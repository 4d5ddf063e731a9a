"""Leviathan, Kalman and Matias, ICML 2023, figures 2 and 3: tokens per round and
the optimal γ by α.

https://arxiv.org/abs/2211.17192
"""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import fmean

from outrider.lab.analysis.speedup import optimal_gamma, speedup
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.figures.leviathan import COSTS, GAMMAS
from recipes.reproduce.effect import certain
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
_ROUNDS = 20000


def simulated(alpha: float, gamma: int, rounds: int = _ROUNDS) -> float:
    """Mean tokens of rounds in which each token is accepted with probability α."""
    rng = random.Random(f"{alpha}/{gamma}")

    def one() -> int:
        tokens = 1
        while tokens <= gamma and rng.random() < alpha:
            tokens += 1
        return tokens

    return fmean(one() for _ in range(rounds))


def measure(lab: Lab) -> Findings:
    """Compares the formulas with simulated rounds and with all γ up to 40."""
    grid = [(a, g) for a in _ALPHAS for g in GAMMAS]
    worst = max(abs(simulated(a, g) / expected_tokens(a, g) - 1) for a, g in grid)
    best = {(a, c): optimal_gamma(a, c, most=80) for a in _ALPHAS for c in COSTS}
    searched = all(
        max(range(1, 81), key=lambda g: speedup(a, g, c)) == found
        for (a, c), found in best.items()
        if found
    )
    monotone = all(best[a, c] <= best[b, c] for c in COSTS for a, b in pairwise(_ALPHAS))
    gains = all((speedup(a, 1, c) > 1) == (a > c) for a in _ALPHAS for c in (*COSTS, 0.55, 0.75))
    xs = [i / 50 for i in range(50)]
    return Findings(
        [
            certain(
                "equation 1 agrees with simulated rounds within 3 %", f"{worst:.2%}", worst < 0.03
            ),
            certain("the optimal γ of figure 3 is the best of 1 to 80", "all α and c", searched),
            certain("the optimal γ grows with α", "at every c", monotone),
            certain("γ = 1 gains iff α > c (corollary 3.9)", "all α and c", gains),
        ],
        [
            Table(
                "Optimal γ",
                ["c", *(f"α = {a:g}" for a in _ALPHAS)],
                [[f"{c:g}", *(str(best[a, c]) for a in _ALPHAS)] for c in COSTS],
            )
        ],
        [
            Figure(
                "Expected tokens per round",
                "α",
                "tokens per round",
                {f"γ = {g}": [(x, expected_tokens(x, g)) for x in xs] for g in GAMMAS},
            ),
            Figure(
                "Optimal γ",
                "α",
                "γ",
                {
                    f"c = {c:g}": [(x, optimal_gamma(x, c, most=80)) for x in xs if 0 < x < 0.95]
                    for c in COSTS
                },
            ),
        ],
        ["Both figures follow from formulas, so no model is involved."],
    )


RECIPE = Recipe(
    "leviathan-figures-2-3",
    "Tokens per round and the optimal γ",
    "Leviathan et al., ICML 2023, figures 2 and 3",
    "Tokens per round are (1 - α^(γ + 1)) / (1 - α); the γ with the greatest speed-up grows with α "
    "and falls with c.",
    measure,
)
