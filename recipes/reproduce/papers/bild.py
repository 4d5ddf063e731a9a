"""Kim, Mangalam, Moon, Malik, Mahoney, Gholami and Keutzer, "Speculative Decoding with Big Little
Decoder", NeurIPS 2023: fallback and rollback thresholds.

https://arxiv.org/abs/2302.07863
"""

from __future__ import annotations

from recipes.reproduce.effect import greater, greater_mean, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import nats, tokens_per_round, values
from recipes.reproduce.recipe import Figure, Findings, PaperModels, Recipe, Table

STEPS = 10


def measure(lab: Lab) -> Findings:
    """Both thresholds, greedy, as in the paper."""
    fallbacks = lab.choose([0.3, 0.9], [0.3, 0.6, 0.9])
    rollbacks = lab.choose([1.0, 5.0], [1.0, 2.0, 3.0, 5.0])
    grid = [(a, b) for a in fallbacks for b in rollbacks]
    methods = [f"bild:fallback={a:g},rollback={b:g},label={a:g}/{b:g}" for a, b in grid]
    cells = lab.bench(*methods, gammas=[STEPS], temperatures=[0.0], metrics=["perplexity"])
    by_grid = {(a, b): cells.one(f"{a:g}/{b:g}") for a, b in grid}
    per_pass = {at: values(cell, tokens_per_round) for at, cell in by_grid.items()}
    least, most = fallbacks[0], fallbacks[-1]
    strict, lax = rollbacks[0], rollbacks[-1]
    argmax = nats(cells.one("plain"))
    effects = [
        greater(
            "a lower fallback threshold calls the target less often",
            per_pass[least, lax],
            per_pass[most, lax],
        ),
        greater(
            "a higher rollback threshold keeps more per call",
            per_pass[least, lax],
            per_pass[least, strict],
        ),
        greater_mean(
            "a higher rollback threshold raises the log perplexity",
            nats(by_grid[least, lax]),
            nats(by_grid[least, strict]),
            expected="greedy outputs of a small one repeat themselves, "
            "which lowers perplexity whoever writes them",
        ),
    ]
    rows = [
        [f"{a:g}", f"{b:g}", f"{mean(per_pass[a, b]):.2f}", f"{mean(nats(by_grid[a, b])):.3f}"]
        for a, b in grid
    ]
    rows.append(["argmax", "", "1.00", f"{mean(argmax):.3f}"])
    lines = {
        f"fallback {a:g}": [(mean(nats(by_grid[a, b])), mean(per_pass[a, b])) for b in rollbacks]
        for a in fallbacks
    }
    head = ["fallback", "rollback, nats", "tokens per target pass", "nats per token"]
    figure = Figure("Quality and target passes", "nats per token", "tokens per target pass", lines)
    return Findings(effects, [Table("Greedy, at most 10 draft tokens", head, rows)], [figure])


RECIPE = Recipe(
    "bild-thresholds",
    "BiLD: fallback and rollback thresholds",
    "Kim et al. (BiLD), NeurIPS 2023",
    "The thresholds trade calls of the large model for quality.",
    measure,
    PaperModels("google/mt5-large", ("google/mt5-small",)),
)
