"""Spector and Ré, "Accelerating LLM Inference with Staged Speculative Decoding", 2023: three levels
against two and one.

https://arxiv.org/abs/2308.04623
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.lab.bench import CellResult
from recipes.reproduce.blame import Rivals, against
from recipes.reproduce.effect import Effect, Values, greater, mean, same
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import tokens_per_round, values
from recipes.reproduce.papers.leviathan_tables import ngram_file
from recipes.reproduce.recipe import Findings, Recipe, Table

GAMMA = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperatures": [0.0]},
    "top-k 50": {"temperatures": [1.0], "top_k": 50},
}
PUBLISHED = {"greedy": 475 / 350, "top-k 50": 298 / 219}
"""Three levels to two."""
METER = "energy-model"


def measure(lab: Lab) -> Findings:
    """Plain, draft model, and draft model with drafts from n-grams. Forward passes are counted."""
    file = ngram_file(lab)
    repeats = lab.choose(16, lab.size.repeats)
    rows, rivals, effects = [], list[Rivals](), list[Effect]()
    for name, settings in SETTINGS.items():
        data = lab.choose(replace(lab.subject.prompts["code"], limit=3), "code")
        cells = lab.bench(
            "speculative",
            f"staged:inner=ngram,file={file},label=staged",
            data=data,
            gammas=[GAMMA],
            meters=[METER],
            batch_sizes=[1],
            repeats=repeats,
            max_new_tokens=lab.choose(16, lab.size.tokens),
            **settings,
        )
        plain, two, three = (cells.one(each) for each in ("plain", "speculative", "staged"))
        levels = f"three levels, {name}", three, "two levels", two, plain
        rivals.append(Rivals(*levels, PUBLISHED[name]))
        rounds = [values(each, tokens_per_round) for each in (two, three)]
        effects.append(same(f"{name}: both levels of drafts emit alike per target pass", *rounds))
        draft_passes = [_draft_passes(each, plain) for each in (two, three)]
        if settings["temperatures"] != [0.0]:
            effects.append(
                greater(f"{name}: staged runs the draft model less often", *draft_passes)
            )
        if lab.size.timed:
            speeds = [lab.speed(each, 0, 0) for each in (three, two, plain)]
            effects += [
                greater(f"{name}: three levels faster than two", speeds[0], speeds[1]),
                greater(f"{name}: two levels faster than one", speeds[1], speeds[2]),
            ]
        for cell, passes in ((plain, {}), (two, draft_passes[0]), (three, draft_passes[1])):
            measured = mean(lab.speed(cell, 0, 0)) if lab.size.timed else None
            rows.append(
                [
                    f"{cell.cell.title}, {name}",
                    f"{mean(values(cell, tokens_per_round)):.2f}",
                    f"{mean(passes):.2f}" if passes else "",
                    "" if measured is None else f"{measured:.1f}",
                ]
            )
    causes, shortfalls = against(lab, rivals)
    head = ["", "tokens per target pass", "draft passes per token", "tokens/s"]
    return Findings(
        effects,
        [Table(f"γ {GAMMA}, trigrams below the draft model", head, rows), *causes],
        notes=[
            "The paper: 150, 350 and 475 tokens/s greedy; 150, 219 and 298 with top-k 50. Its "
            "n-grams were counted on 120 million tokens sampled from the draft model; these on a "
            "little source code.",
        ],
        shortfalls=shortfalls,
    )


def _draft_passes(cell: CellResult, plain: CellResult) -> Values:
    """Forward passes of the draft model per emitted token, in each repeat."""
    (target,) = plain.repeats[0].readings[METER]["work"]
    found = {}
    for repeat in cell.repeats:
        work = repeat.readings[METER]["work"]
        passes = [each["passes"] for model, each in work.items() if model != target]
        found[repeat.number, 0, 0] = sum(passes) / repeat.tokens
    return found


RECIPE = Recipe(
    "staged",
    "Staged decoding: three levels",
    "Spector and Ré, 2023",
    "150, 350 and 475 tokens/s for one, two and three levels, greedy; 150, 219 and 298 with top-k "
    "50.",
    measure,
)
