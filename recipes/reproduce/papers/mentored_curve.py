"""Tran-Thien, "An Optimal Lossy Variant of Speculative Decoding", 2023: acceptance by the budget
D at single positions.

https://vivien000.github.io/blog/journal/a-provably-optimal-lossy-variant-of-speculative-decoding.html
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from outrider import Sampling
from outrider.lab.analysis.frontier import rule_outcome
from outrider.lab.frontier.distributions import paired_distributions
from outrider.verifiers import Lenience, Mentored
from recipes.reproduce.effect import Values, certain, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.papers.mentored_chart import TEMPERATURE
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

BUDGETS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
LENIENCE = 0.8
_SLACK = 1e-5  # rounding of sums over the vocabulary
_NEGLIGIBLE = 1e-20
"""Probabilities of the target below this are set to 0. Where the draft's underflows, the best π is
p exp(-D / p), which no float holds: π would be 0 and KL(p‖π) infinite."""


def outcomes(lab: Lab, positions: int) -> dict[str, Any]:
    """Acceptance and KL at each position: of each budget, of lenience, and of the best rule with
    the divergence that lenience spends there."""
    target = lab.model(lab.subject.target, "target")
    draft = lab.model(lab.draft)
    prompts = lab.prompt_ids("code")
    sampling = Sampling(
        temperature=TEMPERATURE, max_new_tokens=lab.size.tokens, seed=lab.seed, ignore_eos=True
    )
    p_KV, q_KV = paired_distributions(target, draft, prompts, sampling, positions)
    p_KV = p_KV.masked_fill(p_KV < _NEGLIGIBLE, 0)
    p_KV, q_KV = (each.double() / each.double().sum(1, keepdim=True) for each in (p_KV, q_KV))
    found: dict[str, Any] = {"R": {}, "KL": {}}
    for D in BUDGETS:
        outcome = rule_outcome(Mentored(budget=D), p_KV, q_KV)
        found["R"][f"{D:g}"] = outcome.acceptance_K.tolist()
        found["KL"][f"{D:g}"] = outcome.divergences.kl.tolist()
    lenient = rule_outcome(Lenience(LENIENCE), p_KV, q_KV)
    found["lenience"] = lenient.acceptance_K.tolist()
    spent = lenient.divergences.kl.tolist()
    best = [
        float(
            rule_outcome(
                Mentored(budget=max(kl, 0.0)), p_KV[k : k + 1], q_KV[k : k + 1]
            ).acceptance_K
        )
        for k, kl in enumerate(spent)
    ]
    found["best"] = best
    return found


def measure(lab: Lab) -> Findings:
    """Acceptance R as a function of D, at the positions of the target's own samples."""
    positions = lab.choose(96, 768)
    found = lab.kept("mentored-curve", lambda: outcomes(lab, positions), positions=positions)
    R = {D: _values(found["R"][f"{D:g}"]) for D in BUDGETS}
    kl = {D: _values(found["KL"][f"{D:g}"]) for D in BUDGETS}
    monotone = all(R[b][unit] >= R[a][unit] - _SLACK for a, b in pairwise(BUDGETS) for unit in R[a])
    within = max(kl[D][unit] - D for D in BUDGETS for unit in kl[D])
    above = min(b - a for a, b in zip(found["lenience"], found["best"], strict=True))
    low, high = BUDGETS[0], 0.1
    effects = [
        certain("R never falls as D grows, at any position", f"{len(R[low])} positions", monotone),
        certain(
            "KL never exceeds D, at any position", f"excess {max(within, 0):.1g}", within < _SLACK
        ),
        certain(
            f"lenience {LENIENCE:g} never accepts more at its own KL",
            f"least advantage {above:.1g}",
            above > -1e-4,
        ),
        greater(f"D = {high:g} accepts more than exact verification", R[high], R[low]),
    ]
    rows = [[f"{D:g}", f"{mean(R[D]):.4f}", f"{mean(kl[D]):.4f}"] for D in BUDGETS]
    return Findings(
        effects,
        [
            Table(
                f"Means over positions, temperature {TEMPERATURE:g}",
                ["D", "acceptance R", "KL"],
                rows,
            )
        ],
        [
            Figure(
                "Acceptance by budget",
                "D, nats",
                "probability of acceptance",
                {"mentored": [(D, mean(R[D])) for D in BUDGETS]},
            )
        ],
        ["R and KL are exact at each position; only the choice of positions is random."],
    )


def _values(listed: list[float]) -> Values:
    return {(0, index, 0): float(value) for index, value in enumerate(listed)}


RECIPE = Recipe(
    "mentored-curve",
    "Mentored decoding: acceptance by budget at single positions",
    "Tran-Thien, 2023, proof and notebook",
    "Acceptance grows with D and is the highest that any rule with this divergence reaches.",
    measure,
)
