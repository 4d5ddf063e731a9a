"""Xia, Yang, Dong, Wang, Li, Ge, Liu, Li and Sui, "Unlocking Efficiency in Large Language Model
Inference: A Comprehensive Survey of Speculative Decoding" (Spec-Bench), Findings of ACL 2024:
methods ranked on six tasks.

https://arxiv.org/abs/2401.07851
"""

from __future__ import annotations

from typing import Any

from outrider.lab.bench import DataSpec
from outrider.lab.data import read_data
from recipes.reproduce.effect import Effect, Values, certain, greater, mean
from recipes.reproduce.lab import Cells, Lab
from recipes.reproduce.recipe import Findings, PaperModels, Recipe, Table
from recipes.reproduce.subject import Kind

METHODS = {
    "speculative": "speculative:gamma=4,label=speculative",
    "prompt lookup": "prompt-lookup:gamma=8,label=prompt lookup",
    "suffix": "suffix:gamma=8,label=suffix",
    "hybrid": "hybrid:gamma=8,label=hybrid",
}
_PASSES = {"speculative": 4, "hybrid": 5}
KINDS: tuple[Kind, ...] = ("code", "free", "copy")


def measure(lab: Lab) -> Findings:
    """Speed of each method on each task, greedy."""
    speeds = _by_kind(lab) if lab.subject.target == "embedded" else _by_task(lab)
    order = {
        task: sorted(each, key=lambda name: -mean(each[name])) for task, each in speeds.items()
    }
    best = {task: names[0] for task, names in order.items()}
    first = next(iter(order))
    other = next((task for task in order if order[task] != order[first]), None)
    effects: list[Effect] = []
    if other is None:
        effects.append(certain("two tasks rank the methods differently", "all alike", False))
    else:
        effects += _swap(speeds, order, first, other)
    rows = [
        [task, *(f"{mean(each[name]) / mean(each['plain']):.2f}×" for name in METHODS), best[task]]
        for task, each in speeds.items()
    ]
    notes = []
    if lab.subject.target == "embedded":
        notes.append(
            "Three kinds of prompts stand for the six tasks: the embedded pair writes code."
        )
    notes.append(
        "The paper, Vicuna-7B on an A100: EAGLE-2 2.36×, Recycling 2.22×, Medusa 1.71×, prompt "
        "lookup 1.66×, a 68M draft 1.52×, Lookahead 1.34×; on a 3090 the draft is above Medusa."
    )
    head = ["task", *METHODS, "fastest"]
    return Findings(
        effects, [Table("Speed-up over plain decoding, greedy", head, rows)], notes=notes
    )


def _swap(
    speeds: dict[str, dict[str, Values]], order: dict[str, list[str]], first: str, other: str
) -> list[Effect]:
    """The two methods whose order differs most clearly between two tasks."""
    pairs = [
        (a, b)
        for index, a in enumerate(order[first])
        for b in order[first][index + 1 :]
        if order[other].index(a) > order[other].index(b)
    ]

    def weakest(pair: tuple[str, str]) -> float:
        a, b = pair
        here = greater("", speeds[first][a], speeds[first][b])
        there = greater("", speeds[other][b], speeds[other][a])
        return max(here.error, there.error)

    a, b = min(pairs, key=weakest)
    why = "the pair of methods was chosen by the clearest difference; few prompts"
    return [
        greater(f"{first}: {a} faster than {b}", speeds[first][a], speeds[first][b], expected=why),
        greater(f"{other}: {b} faster than {a}", speeds[other][b], speeds[other][a], expected=why),
    ]


def _by_kind(lab: Lab) -> dict[str, dict[str, Values]]:
    return {
        kind: _speeds(lab, lab.bench(*METHODS.values(), data=kind, temperatures=[0.0]))
        for kind in KINDS
    }


def _by_task(lab: Lab) -> dict[str, dict[str, Values]]:
    """A run per task."""
    whole = lab.subject.tasks
    tasks: Any = {each.task: None for each in read_data(whole.source)}
    found = {}
    for task in tasks:
        spec = DataSpec(whole.source, task, (task,), prompts=whole.prompts)
        found[task] = _speeds(lab, lab.bench(*METHODS.values(), data=spec, temperatures=[0.0]))
    return found


def _speeds(lab: Lab, cells: Cells) -> dict[str, Values]:
    c = lab.cost()
    return {
        name: lab.speed(cells.one(name), c, _PASSES.get(name, 0)) for name in ("plain", *METHODS)
    }


RECIPE = Recipe(
    "spec-bench",
    "Methods ranked by task",
    "Xia et al. (Spec-Bench), Findings of ACL 2024",
    "The ranking of methods differs between tasks and between machines.",
    measure,
    PaperModels("lmsys/vicuna-7b-v1.3", ("double7/vicuna-68m",)),
)
