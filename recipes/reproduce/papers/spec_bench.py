"""Xia, Yang, Dong, Wang, Li, Ge, Liu, Li and Sui, "Unlocking Efficiency in Large Language Model
Inference: A Comprehensive Survey of Speculative Decoding" (Spec-Bench), Findings of ACL 2024:
methods ranked on six tasks.

https://arxiv.org/abs/2401.07851
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.lab.bench import DataSpec
from outrider.lab.data import read_data
from recipes.reproduce.blame import Compared, blamed
from recipes.reproduce.effect import Values, greater, mean
from recipes.reproduce.lab import Cells, Lab
from recipes.reproduce.recipe import Findings, PaperModels, Recipe, Table
from recipes.reproduce.subject import Kind

MODEL, LOOKUP = "speculative", "prompt lookup"
COPYING = {
    LOOKUP: "prompt-lookup:gamma=8,label=prompt lookup",
    "suffix": "suffix:gamma=8,corpus_tokens=0,label=suffix",
}
"""Without a memory of earlier outputs, which would hold the outputs of earlier repeats."""
WITH_DRAFT = {"hybrid": "hybrid:gamma=8,label=hybrid"}
WITH_HEAD = {"eagle3 tree": "eagle3-dynamic-tree:num_nodes=16,depth=4,label=eagle3 tree"}
BESIDE_DRAFT = {"eagle3": "eagle3:gamma=4,label=eagle3"}
"""Where there is a draft model; elsewhere it is ``MODEL``."""
PUBLISHED = {"draft": 1.52, "head": 2.36}
"""The paper's speed-ups with a draft of 68M and with EAGLE-2, over all tasks."""
_PASSES = {"speculative": 4, "hybrid": 5}
MOST = 1000
"""Examples of a task."""
KINDS: tuple[Kind, ...] = ("code", "free", "copy")


def methods_of(lab: Lab) -> dict[str, str]:
    """The methods that the subject has drafts for, by their names in the table."""
    found = {MODEL: lab.speculative(gamma=4)} | COPYING
    if lab.subject.drafts:
        found |= WITH_DRAFT
    if lab.subject.heads:
        found |= (BESIDE_DRAFT if lab.subject.drafts else {}) | WITH_HEAD
    return found


def measure(lab: Lab) -> Findings:
    """Speed of each method on each task. Which two methods change their order is fixed beforehand:
    a draft model leads where there is nothing to copy, prompt lookup where there is."""
    methods = methods_of(lab)
    embedded = lab.subject.target == "embedded"
    cells = _by_kind(lab) if embedded else _by_task(lab)
    speeds = {task: _speeds(lab, each) for task, each in cells.items()}
    by_kind = {kind: _of_kind(lab, kind, speeds) for kind in KINDS}
    free, copy = by_kind["free"], by_kind["copy"]
    effects = [
        greater(f"free: {MODEL} faster than {LOOKUP}", free[MODEL], free[LOOKUP]),
        greater(f"copy: {LOOKUP} faster than {MODEL}", copy[LOOKUP], copy[MODEL]),
    ]
    rows = [
        [
            task,
            *(f"{mean(each[name]) / mean(each['plain']):.2f}×" for name in methods),
            max(methods, key=lambda name: mean(each[name])),
        ]
        for task, each in speeds.items()
    ]
    notes = [
        "The paper, Vicuna-7B on an A100: EAGLE-2 2.36×, Recycling 2.22×, Medusa 1.71×, prompt "
        "lookup 1.66×, a 68M draft 1.52×, Lookahead 1.34×; on a 3090 the draft is above Medusa."
    ]
    if embedded:
        notes.append(
            "Three kinds of prompts stand for the six tasks, since the embedded pair writes code. "
            "Its greedy outputs repeat themselves, which favours copying on every prompt, so that "
            "these are sampled; the outputs of copy are forced to be the references."
        )
    else:
        notes.append(
            "The effects take the tasks of a kind together: a task has five or six greedy outputs, "
            "of which the sign test decides nothing unless all agree. That was chosen after a look "
            "at the single tasks."
        )
    if not lab.subject.drafts and lab.subject.heads:
        notes.append(
            f"There is no draft model: {MODEL} is the chain of four tokens of the EAGLE-3 head, "
            "which was trained on 891,000 tokens (docs/heads.md)."
        )
    head = ["task", *methods, "fastest"]
    how = "temperature 1" if embedded else "greedy"
    published = PUBLISHED["draft" if lab.subject.drafts else "head"]
    causes, shortfalls = blamed(
        lab,
        [
            Compared(task, each.one(MODEL), each.one("plain"), lab.cost(), published)
            for task, each in cells.items()
            if lab.size.timed  # a counted speed has no factors that its table does not show
        ],
    )
    table = Table(f"Speed-up over plain decoding, {how}", head, rows)
    return Findings(effects, [table, *causes], notes=notes, shortfalls=shortfalls)


def _of_kind(lab: Lab, kind: Kind, speeds: Mapping[str, Mapping[str, Values]]) -> dict[str, Values]:
    """The speeds on all tasks of a kind of prompts, by method; examples are numbered through."""
    tasks = lab.subject.prompts[kind].tasks or (kind,)
    methods = speeds[tasks[0]]
    return {
        name: {
            (repeat, number * MOST + example, turn): value
            for number, task in enumerate(tasks)
            for (repeat, example, turn), value in speeds[task][name].items()
        }
        for name in methods
    }


def _by_kind(lab: Lab) -> dict[str, Cells]:
    methods = methods_of(lab).values()
    return {kind: lab.bench(*methods, data=kind, temperatures=[1.0]) for kind in KINDS}


def _by_task(lab: Lab) -> dict[str, Cells]:
    """A run per task."""
    whole, methods = lab.subject.tasks, methods_of(lab).values()
    tasks: Any = {each.task: None for each in read_data(whole.source)}
    found = {}
    for task in tasks:
        spec = DataSpec(whole.source, task, (task,), prompts=whole.prompts)
        found[task] = lab.bench(*methods, data=spec, temperatures=[0.0])
    return found


def _speeds(lab: Lab, cells: Cells) -> dict[str, Values]:
    c = lab.cost()
    return {
        name: lab.speed(cells.one(name), c, _PASSES.get(name, 0))
        for name in ("plain", *methods_of(lab))
    }


RECIPE = Recipe(
    "spec-bench",
    "Methods ranked by task",
    "Xia et al. (Spec-Bench), Findings of ACL 2024",
    "The ranking of methods differs between tasks and between machines.",
    measure,
    PaperModels("lmsys/vicuna-7b-v1.3", ("double7/vicuna-68m",)),
)
