"""α by the size of the draft model: the trade-off behind the choice of a draft in Leviathan et al.,
ICML 2023, table 2, and DistillSpec (Zhou et al., ICLR 2024).

https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2310.08461
"""

from __future__ import annotations

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench import MethodSpec
from outrider.runtime import HFModel
from recipes.reproduce.effect import Values, greater, mean, rising
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, tokens_per_round, values
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table
from recipes.reproduce.subject import SMOLLM2_NAME

GAMMA = 3
LAYERS = (4, 8, 12)
"""Early exits, where the subject has one draft only."""

EXITS = (
    "The subject has no more than one draft model, so early exits of the target stand for drafts "
    "of growing size. The target was not trained for early exit, so their α are low. `--draft "
    "DIR`, once for each of several draft models, runs this recipe with them."
)
DISTILLED = (
    "One draft model for SmolLM2 comes with the package. `python -m recipes.smollm2_draft --out "
    "runs/smollm2/distilled --layers N --width N` distils one of another size in some ten minutes "
    "once there are conversations; this recipe finds those in runs/smollm2/distilled."
)


def described(draft: HFModel) -> str:
    """The size of a draft model."""
    config = draft.module.config.get_text_config()
    millions = sum(each.numel() for each in draft.module.parameters()) / 1e6
    layers = config.num_hidden_layers
    return (
        f"{layers} layer{'s' * (layers > 1)}, width {config.hidden_size}, "
        f"{millions:.1f} million parameters"
    )


def measure(lab: Lab) -> Findings:
    """α at temperature 1 of drafts of growing size."""
    drafts = lab.subject.drafts
    methods: list[str | MethodSpec]
    if len(drafts) > 1:
        names = {described(lab.model(draft)): draft for draft in drafts}
        if len(names) < len(drafts):
            raise InvalidParameterError(
                f"drafts {', '.join(drafts)}: two of them are of one size, and this recipe "
                f"compares sizes; leave one out"
            )
        counted = {name: lab.cost(draft) for name, draft in names.items()}
        costs = dict(sorted(counted.items(), key=lambda each: each[1]))
        methods = [
            MethodSpec("speculative", draft=draft, label=name) for name, draft in names.items()
        ]
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
        [] if len(drafts) > 1 else [EXITS, *[DISTILLED] * (lab.subject.name == SMOLLM2_NAME)],
    )


RECIPE = Recipe(
    "draft-size",
    "α by the size of the draft",
    "Leviathan et al., ICML 2023; DistillSpec, ICLR 2024",
    "Larger drafts have a higher α and cost more.",
    measure,
)
