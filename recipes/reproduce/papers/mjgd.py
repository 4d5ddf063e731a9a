"""MJSD (Qin et al., 2024), figure 1: multi-token joint greedy decoding by block length.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from itertools import pairwise

from recipes.reproduce.effect import falling_mean, greater, greater_mean, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import nats
from recipes.reproduce.papers.mjsd_table_2 import MODELS
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

BEAMS = 8
REPEATS = (
    "greedy outputs of a small target repeat themselves, and few prompts decide whether argmax "
    "decoding repeats more"
)
NOISE = (
    "Perplexities are compared, so that no factor of a speed-up has a part in the verdict. Greedy "
    "decoding gives one output per prompt: the noise is that between prompts."
)


def measure(lab: Lab) -> Findings:
    """K = 1, which is argmax decoding, to 5."""
    lengths = lab.choose([2, 5], [2, 3, 4, 5])
    methods = [f"mjgd:beams={BEAMS},gamma={K - 1},label=K = {K}" for K in lengths]
    cells = lab.bench(*methods, temperatures=[0.0], metrics=["perplexity"])
    by_length = {1: nats(cells.one("plain"))}
    by_length |= {K: nats(cells.one(f"K = {K}")) for K in lengths}
    last = lengths[-1]
    first = lab.bench(methods[-1], temperatures=[0.0], metrics=["perplexity"], max_new_tokens=last)
    alone, together = nats(first.one("plain")), nats(first.one(f"K = {last}"))
    effects = [
        greater(
            f"log perplexity of the first {last} tokens is lower if they are found together",
            alone,
            together,
        ),
        greater_mean(
            f"log perplexity at K = {last} is below that at 1",
            by_length[1],
            by_length[last],
            expected=REPEATS,
        ),
        falling_mean("log perplexity falls with K", by_length, expected=REPEATS),
    ]
    steps = [mean(by_length[a]) - mean(by_length[b]) for a, b in pairwise([1, *lengths])]
    rows = [[str(K), f"{mean(each):.4f}"] for K, each in by_length.items()]
    figure = Figure(
        "MJGD by block length",
        "K (1: argmax decoding)",
        "nats per token",
        {f"{BEAMS} beams": [(K, mean(each)) for K, each in by_length.items()]},
    )
    same = sum(alone[unit] == together.get(unit) for unit in alone)
    opening = (
        f"The first {last} tokens have the same perplexity at K = {last} as at 1 in {same} of "
        f"{len(alone)} outputs."
    )
    largest = "the largest" if steps[0] == max(steps) else "not the largest"
    return Findings(
        effects,
        [Table(f"{BEAMS} beams", ["K", "nats per token"], rows)],
        [figure],
        [
            f"The first step, from K = 1 to 2, is {largest} of the steps that were measured.",
            opening,
            NOISE,
        ],
    )


RECIPE = Recipe(
    "mjgd-figure-1",
    "Joint greedy decoding by block length",
    "Qin et al. (MJSD), 2024, figure 1",
    "The perplexity falls with the number K of tokens that are found together, most from 1 to 2.",
    measure,
    MODELS,
)
