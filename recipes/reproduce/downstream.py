"""Task metrics of outputs: ROUGE of summaries, final numbers of calculations, BLEU of translations.

They need a target that does the task and prompts with reference answers, which the embedded pair
has not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.lab.bench import CellResult
from outrider.lab.data import read_data
from recipes.reproduce.effect import interval, paired
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import metric_values
from recipes.reproduce.recipe import Table


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task.

    Attributes:
        task: of the subject's tasks.
        metric: as the benchmark names it.
        number: of the metric, over all outputs.
        each: of the metric, of each output.
        title: in tables.
    """

    task: str
    metric: str
    number: str
    each: str
    title: str


ROUGE = TaskMetric("summarisation", "rouge", "rougeL", "rougeL", "ROUGE-L of summaries")
ROUGE_2 = TaskMetric("summarisation", "rouge", "rouge2", "rouge2", "ROUGE-2 of summaries")
FINAL_NUMBER = TaskMetric("maths", "gsm8k", "flexible", "flexible", "exact match of final numbers")
BLEU = TaskMetric("translation", "bleu", "bleu", "sentence_bleu", "BLEU of translations")

BASELINE = "plain"


def downstream(
    lab: Lab, wanted: Sequence[TaskMetric], methods: Sequence[str], **settings: Any
) -> tuple[list[Table], list[str]]:
    """A table of each metric, plain decoding in its first row; and a note where there is none.

    Args:
        lab: whose subject may have the tasks.
        wanted: the metrics.
        methods: with their labels.
        settings: of the plan.
    """
    known = {each.task for each in read_data(lab.subject.tasks.source)}
    missing = [each for each in wanted if each.task not in known]
    if missing:
        names = ", ".join(each.title for each in missing)
        return [], [
            f"Not measured on {lab.subject.name}, whose prompts have no references: {names}."
        ]
    return [_table(lab, each, methods, settings) for each in wanted], []


def _table(lab: Lab, wanted: TaskMetric, methods: Sequence[str], settings: dict[str, Any]) -> Table:
    data = replace(lab.subject.tasks, name=wanted.task, tasks=(wanted.task,))
    cells = lab.bench(
        *methods, data=data, metrics=[wanted.metric], **settings | {"ignore_eos": False}
    )
    plain = cells.one(BASELINE)
    rows = [
        [
            cell.cell.title,
            f"{cell.metrics[wanted.metric][wanted.number]:.3g}",
            _above(cell, plain, wanted),
        ]
        for cell in cells.all
    ]
    head = ["", wanted.title, "mean difference of outputs to plain, 95 % interval"]
    return Table(wanted.title, head, rows)


def _above(cell: CellResult, plain: CellResult, wanted: TaskMetric) -> str:
    if cell is plain:
        return ""
    mine, theirs = (metric_values(each, wanted.metric, wanted.each) for each in (cell, plain))
    differences = [a - b for a, b in zip(*paired(mine, theirs), strict=True)]
    low, high = interval(differences, statistics.fmean)
    return f"{statistics.fmean(differences):+.3g} ({low:.3g} to {high:.3g})"
