"""Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023, table
1: equal task metrics, and a greater speed-up on programs than on summaries.

https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from recipes.reproduce.effect import exceeds, greater, mean, same
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, nats, tokens_per_round, values
from recipes.reproduce.recipe import Findings, Recipe, Table
from recipes.reproduce.subject import Kind

GAMMA = 4
KINDS: tuple[Kind, ...] = ("code", "free")


def measure(lab: Lab) -> Findings:
    """Plain and speculative sampling on two kinds of prompts."""
    c = lab.cost()
    rows, effects, per_round = [], [], {}
    for kind in KINDS:
        cells = lab.bench(
            lab.speculative(),
            data=kind,
            gammas=[GAMMA],
            temperatures=[1.0],
            metrics=["perplexity"],
        )
        plain, fast = cells.one("plain"), cells.one("speculative")
        speeds = lab.speed(fast, c, GAMMA), lab.speed(plain, 0, 0)
        per_round[kind] = values(fast, tokens_per_round)
        effects += [
            same(f"{kind}: log perplexities of the outputs agree", nats(fast), nats(plain)),
            greater(f"{kind}: faster than plain sampling", *speeds),
        ]
        rows.append(
            [
                kind,
                f"{mean(nats(plain)):.3f}",
                f"{mean(nats(fast)):.3f}",
                f"{mean(values(fast, alpha)):.3f}",
                f"{mean(per_round[kind]):.2f}",
                f"{mean(speeds[0]) / mean(speeds[1]):.2f}×",
            ]
        )
    effects.append(
        exceeds(
            "more tokens per round on code than on prose",
            per_round["code"],
            per_round["free"],
            expected="the prose is of docstrings, of which the pair has seen as much as of code",
        )
    )
    head = ["prompts", "nats per token, plain", "speculative", "α", "tokens per round", "speed-up"]
    return Findings(
        effects,
        [Table(f"Two kinds of prompts, γ {GAMMA}, temperature 1", head, rows)],
        notes=[
            "The paper's metrics are ROUGE-2 on XSum and pass@100 on HumanEval. Both methods "
            "sample from the same distribution, which the test suite proves by exact enumeration; "
            "a task metric can only fail to show a difference. Its printed 1.92× of XSum with "
            "nucleus sampling is 14.1 / 7.52 = 1.875×.",
        ],
    )


RECIPE = Recipe(
    "chen-table-1",
    "Equal outputs, faster; programs more so than prose",
    "Chen et al., 2023, table 1",
    "Task metrics are equal; 1.92× to 2.46×, more on HumanEval than on XSum.",
    measure,
)
