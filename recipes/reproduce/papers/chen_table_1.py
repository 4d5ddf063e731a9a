"""Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023, table
1: equal task metrics, and a greater speed-up on programs than on summaries.

https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from outrider.lab.analysis.prediction import Factors, published_factors
from outrider.lab.analysis.speedup import alpha_of_tokens, tokens_of_latency
from recipes.reproduce.blame import Compared, blamed
from recipes.reproduce.downstream import ROUGE_2, downstream
from recipes.reproduce.effect import exceeds, greater, mean, same
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, nats, tokens_per_round, values
from recipes.reproduce.recipe import Findings, Recipe, Table
from recipes.reproduce.subject import Kind

GAMMA = 4
PLAIN_MS, DRAFT_MS = 14.1, 1.8
"""Milliseconds of a plain step and of a draft pass of Chinchilla 70B and its 4B draft."""
PUBLISHED_MS = {"code": 5.73, "free": 7.52}
"""Milliseconds per token of nucleus sampling on HumanEval and on XSum."""
KINDS: tuple[Kind, ...] = ("code", "free")


def published(kind: Kind) -> Factors:
    """The paper's factors: its loop takes 14.1 + 4 · 1.8 ms, from which its tokens per loop and α
    follow."""
    loop = PLAIN_MS + GAMMA * DRAFT_MS
    alpha = alpha_of_tokens(tokens_of_latency(PUBLISHED_MS[kind], loop), GAMMA)
    speedup = PLAIN_MS / PUBLISHED_MS[kind]
    return published_factors(speedup, alpha=alpha, gamma=GAMMA, c=DRAFT_MS / PLAIN_MS)


def measure(lab: Lab) -> Findings:
    """Plain and speculative sampling on two kinds of prompts."""
    c = lab.cost()
    rows, effects, per_round, compared = [], [], {}, []
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
        factors = published(kind)
        compared.append(Compared(kind, fast, plain, c, factors.speedup, factors))
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
    tasks, missing = downstream(
        lab, (ROUGE_2,), [lab.speculative()], gammas=[GAMMA], temperatures=[1.0]
    )
    tables, shortfalls = blamed(lab, compared)
    head = ["prompts", "nats per token, plain", "speculative", "α", "tokens per round", "speed-up"]
    return Findings(
        effects,
        [Table(f"Two kinds of prompts, γ {GAMMA}, temperature 1", head, rows), *tasks, *tables],
        notes=[
            "The paper's metrics are ROUGE-2 on XSum and pass@100 on HumanEval. Both methods "
            "sample from the same distribution, which the test suite proves by exact enumeration; "
            "a task metric can only fail to show a difference. Its printed 1.92× of XSum with "
            "nucleus sampling is 14.1 / 7.52 = 1.875×.",
            *missing,
        ],
        shortfalls=shortfalls,
    )


RECIPE = Recipe(
    "chen-table-1",
    "Equal outputs, faster; programs more so than prose",
    "Chen et al., 2023, table 1",
    "Task metrics are equal; 1.92× to 2.46×, more on HumanEval than on XSum.",
    measure,
)
