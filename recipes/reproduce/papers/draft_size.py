"""α by the size of the draft model: the trade-off behind the choice of a draft in Leviathan et al.,
ICML 2023, table 2, and DistillSpec (Zhou et al., ICLR 2024).

https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2310.08461
"""

from __future__ import annotations

from recipes.reproduce.effect import Values, greater, mean, rising
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, tokens_per_round, values
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

GAMMA = 3
LAYERS = (4, 8, 12)
"""Early exits, where the subject has one draft only."""


def measure(lab: Lab) -> Findings:
    """α at temperature 1 of drafts of growing size."""
    drafts = lab.subject.drafts
    if len(drafts) > 1:
        costs = {name: lab.cost(name) for name in drafts}
        methods = [f"speculative:draft={name},label={name}" for name in drafts]
        kind = "draft models"
    else:
        num = lab.model(lab.subject.target, "target").num_layers
        costs = {f"{k} of {num} layers": k / num for k in LAYERS}
        methods = [
            f"early-exit:layer={k},label={name}" for k, name in zip(LAYERS, costs, strict=True)
        ]
        kind = "early exits of the target"
    cells = lab.bench(*methods, drafts=list(drafts), gammas=[GAMMA], temperatures=[1.0])
    alphas: dict[float, Values] = {c: values(cells.one(name), alpha) for name, c in costs.items()}
    sizes = sorted(alphas)
    plain = mean(lab.speed(cells.one("plain"), 0, 0))
    rows = [
        [
            name,
            f"{c:.3f}",
            f"{mean(alphas[c]):.3f}",
            f"{mean(values(cells.one(name), tokens_per_round)):.2f}",
            f"{mean(lab.speed(cells.one(name), c, GAMMA)) / plain:.2f}×",
        ]
        for name, c in costs.items()
    ]
    head = ["draft", "c", "α", "tokens per round", "speed-up"]
    return Findings(
        [
            greater(
                "the largest draft's α exceeds the smallest's", alphas[sizes[-1]], alphas[sizes[0]]
            ),
            rising("α grows with the size of the draft", alphas),
        ],
        [Table(f"{kind.capitalize()}, temperature 1, γ {GAMMA}", head, rows)],
        [Figure("α by size of the draft", "c", "α", {kind: [(c, mean(alphas[c])) for c in sizes]})],
        []
        if len(drafts) > 1
        else [
            "The subject has one draft model, so early exits of the target stand for drafts of "
            "growing size. The target was not trained for early exit, so their α are low."
        ],
    )


RECIPE = Recipe(
    "draft-size",
    "α by the size of the draft",
    "Leviathan et al., ICML 2023; DistillSpec, ICLR 2024",
    "Larger drafts have a higher α and cost more.",
    measure,
)
