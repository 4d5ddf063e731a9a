"""Sun, Suresh, Ro, Beirami, Jain and Yu, "SpecTr: Fast Speculative Decoding via Optimal Transport",
NeurIPS 2023: accepted length by the number of drafted sequences.

https://arxiv.org/abs/2310.15141
"""

from __future__ import annotations

from recipes.reproduce.blame import Compared, Rivals, against, blamed
from recipes.reproduce.effect import greater, mean, rising
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import tokens_per_round, values
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

GAMMA = 4
TO_PLAIN, TO_SPECULATIVE = 2.13, 1.37
"""The paper's speed-ups with K = 8."""


def measure(lab: Lab) -> Findings:
    """K-SEQ with 1 to 8 sequences."""
    counts = lab.choose([2, 8], [2, 4, 8])
    methods = [f"spectr:num_sequences={K},label=K = {K}" for K in counts]
    cells = lab.bench("speculative", *methods, gammas=[GAMMA], temperatures=[1.0])
    by_count = {1: values(cells.one("speculative"), tokens_per_round)}
    by_count |= {K: values(cells.one(f"K = {K}"), tokens_per_round) for K in counts}
    c, most = lab.cost(), counts[-1]
    speeds = {1: lab.speed(cells.one("speculative"), c, GAMMA)}
    speeds |= {K: lab.speed(cells.one(f"K = {K}"), c, GAMMA) for K in counts}
    plain = mean(lab.speed(cells.one("plain"), 0, 0))
    one, best, base = (cells.one(name) for name in ("speculative", f"K = {most}", "plain"))
    causes, shortfalls = blamed(lab, [Compared(f"K = {most}", best, base, c, TO_PLAIN)])
    rivals, sentences = against(
        lab, [Rivals(f"K = {most}", best, "speculative", one, base, TO_SPECULATIVE)]
    )
    rows = [
        [str(K), f"{mean(each):.2f}", f"{mean(speeds[K]) / plain:.2f}×"]
        for K, each in by_count.items()
    ]
    return Findings(
        [
            greater(
                f"K = {most} emits more per round than one sequence", by_count[most], by_count[1]
            ),
            rising("tokens per round grow with K", by_count),
            greater(f"K = {most} is faster than speculative decoding", speeds[most], speeds[1]),
            greater(
                f"K = {most} is faster than plain sampling",
                speeds[most],
                lab.speed(cells.one("plain"), 0, 0),
            ),
        ],
        [
            Table(f"γ {GAMMA}, temperature 1", ["K", "tokens per round", "speed-up"], rows),
            *causes,
            *rivals,
        ],
        [
            Figure(
                "SpecTr",
                "drafted sequences K",
                "tokens per round",
                {"K-SEQ": [(K, mean(each)) for K, each in by_count.items()]},
            )
        ],
        ["Counted speeds take a forward pass over K sequences to cost as much as over one."],
        [*shortfalls, *sentences],
    )


RECIPE = Recipe(
    "spectr",
    "Accepted length by drafted sequences",
    "Sun et al. (SpecTr), NeurIPS 2023",
    "2.13× of autoregressive decoding and 1.37× of speculative decoding; tokens per round grow "
    "with the number of sequences.",
    measure,
)
