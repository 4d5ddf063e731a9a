"""Qin, Hu, He, Prakriya, Cong and Sun, "Optimized Multi-Token Joint Decoding with Auxiliary Model"
(MTAD), ICLR 2025: against chains of speculative decoding.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from outrider.lab.bench import CellResult
from recipes.reproduce.blame import Rivals, against
from recipes.reproduce.downstream import FINAL_NUMBER, ROUGE, downstream
from recipes.reproduce.effect import certain, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import accepted_per_round, nats, values
from recipes.reproduce.papers.mjsd_table_2 import MODELS
from recipes.reproduce.recipe import Findings, Recipe, Table

GAMMA = 4
MTAD = "mtad:beams=4,threshold=0.5,label=MTAD"
WARP = {"top_k": 10, "top_p": 0.9}


def measure(lab: Lab) -> Findings:
    """Four beams, τ = 0.5, with the authors' truncation."""
    meter = lab.choose("energy-model", "energy")
    cells = lab.bench(
        "speculative",
        MTAD,
        gammas=[GAMMA],
        temperatures=[1.0],
        metrics=["perplexity"],
        **WARP,
    )
    code = lab.subject.prompts["code"]
    metered = lab.bench(
        "speculative",
        MTAD,
        data=lab.choose(replace(code, limit=4), code),
        gammas=[GAMMA],
        temperatures=[1.0],
        batch_sizes=[1],
        meters=[meter],
        repeats=lab.choose(1, lab.size.repeats),
        max_new_tokens=lab.choose(16, lab.size.tokens),
        **WARP,
    )
    plain, chain, joint = (cells.one(name) for name in ("plain", "speculative", "MTAD"))
    c = lab.cost()
    speeds = lab.speed(joint, c, GAMMA), lab.speed(chain, c, GAMMA)
    energy = {cell.cell.title: _joules_per_token(cell, meter) for cell in metered.all}
    ratio = energy["MTAD"] / energy["speculative"]
    reading = metered.one("MTAD").repeats[0].readings[meter]
    estimate = reading.get("estimate")
    effects = [
        greater("faster than speculative decoding", *speeds),
        greater("accepts more per round", *(values(x, accepted_per_round) for x in (joint, chain))),
        greater("log perplexity below that of sampling", nats(plain), nats(joint)),
        certain(
            "less energy per token than speculative decoding"
            + (" (estimated without noise)" if estimate else ""),
            f"{ratio - 1:+.1%}",
            ratio < 1,
            expected="beams take more operations, for which the estimate "
            "charges, and the draft reads a large share of what the target reads",
        ),
    ]
    rows = [
        [
            cell.cell.title,
            f"{mean(values(cell, accepted_per_round)):.2f}",
            f"{mean(nats(cell)):.3f}",
            f"{mean(lab.speed(cell, c, passes)) / mean(lab.speed(plain, 0, 0)):.2f}×",
            f"{energy[cell.cell.title]:.3g}",
        ]
        for cell, passes in ((plain, 0), (chain, GAMMA), (joint, GAMMA))
    ]
    tables, notes = downstream(
        lab,
        (ROUGE, FINAL_NUMBER),
        ["speculative", MTAD],
        gammas=[GAMMA],
        temperatures=[1.0],
        **WARP,
    )
    causes, shortfalls = against(lab, [Rivals("MTAD", joint, "speculative", chain, plain, 1.26)])
    head = ["", "accepted per round", "nats per token", "speed-up", "J per token"]
    source = reading.get("source", meter)
    prompts = metered.one("MTAD").data["examples"]
    return Findings(
        effects,
        [Table("Temperature 1, top-k 10, top-p 0.9, γ 4", head, rows), *tables, *causes],
        notes=[
            f"Energy, of batches of one over {prompts} prompts: {source}. The paper: 1.26× of "
            "speculative decoding, 23.6 % less energy, and task scores 43 % above single-token "
            "sampling.",
            *notes,
        ],
        shortfalls=shortfalls,
    )


def _joules_per_token(cell: CellResult, meter: str) -> float:
    return fmean(repeat.readings[meter]["joules"] / repeat.tokens for repeat in cell.repeats)


RECIPE = Recipe(
    "mtad",
    "MTAD against chains",
    "Qin et al. (MTAD), ICLR 2025",
    "1.26× of speculative decoding with 23.6 % less energy, at a lower perplexity.",
    measure,
    MODELS,
)
