"""MJSD (Qin et al., 2024), table 1: energy of a run by batch size.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from outrider.lab.bench import CellResult, DataSpec
from recipes.reproduce.effect import certain
from recipes.reproduce.lab import Lab
from recipes.reproduce.papers.mjsd_table_2 import MODELS
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table
from recipes.reproduce.subject import Kind

METER = "energy"
ESTIMATE = "energy-model"
PARTS = ("memory_joules", "compute_joules")


def measure(lab: Lab) -> Findings:
    """Plain decoding of the same prompts at several batch sizes."""
    data, sizes = _prompts(lab)
    meter = lab.choose(ESTIMATE, METER)
    cells = lab.bench(
        "plain",
        data=data,
        batch_sizes=sizes,
        temperatures=[0.0],
        meters=[meter],
        repeats=lab.choose(1, lab.size.repeats),
        max_new_tokens=lab.choose(32, lab.size.tokens),
    )
    by_size = {B: cells.one("plain", batch_size=B) for B in sizes}
    joules = {B: _joules_per_batch(cell, meter) for B, cell in by_size.items()}
    tokens = {B: _joules_per_token(cell, meter) for B, cell in by_size.items()}
    first, last = sizes[0], sizes[-1]
    ratio = joules[last] / joules[first]
    readings = by_size[first].repeats[0].readings[meter]
    estimate = bool(readings.get("estimate"))
    kind = "estimated from counted bytes and operations" if estimate else "measured"
    effects = [
        certain(
            f"a batch of {last} costs more energy than one of {first}", f"{ratio:.2f}×", ratio > 1
        ),
        certain(
            f"it costs less than {last / first:g} times as much",
            f"{ratio:.2f}×",
            ratio < last / first,
        ),
        certain(
            "energy per token falls with the batch size",
            " > ".join(f"{tokens[B]:.4g}" for B in sizes),
            all(tokens[a] > tokens[b] for a, b in pairwise(sizes)),
        ),
    ]
    rows = [
        [
            *(str(B), f"{joules[B]:.3g}", f"{joules[B] / joules[first]:.2f}×", f"{tokens[B]:.3g}"),
            *(f"{_joules_per_token(by_size[B], meter, part):.3g}" for part in PARTS if estimate),
        ]
        for B in sizes
    ]
    head = ["batch size", "J per batch", "to the smallest", "J per token"]
    head += ["of these reading", "computing"] if estimate else []
    figure = Figure("Energy of a batch", "batch size", "J", {kind: list(joules.items())})
    notes = [f"Energy is {kind}: {readings.get('source', meter)}.", "The paper: 1.75× at batch 16."]
    if estimate:
        constants = ", ".join(f"{k} {v}" for k, v in readings.get("constants", {}).items())
        notes.append(
            "An estimate without noise; it compares work, and is no measurement. Constants: "
            f"{constants}. A batch shares what it reads of the weights; it shares no operation, "
            "and none of the keys and values."
        )
    return Findings(effects, [Table(f"Energy, {kind}", head, rows)], [figure], notes)


def _prompts(lab: Lab) -> tuple[Kind | DataSpec, list[int]]:
    """As many prompts as the largest batch has rows, and the batch sizes."""
    if not lab.size.timed:
        return "free", [1, 3, 6]
    if lab.subject.target == "embedded":
        return replace(lab.subject.prompts["code"], limit=12), [1, 2, 4, 12]
    return replace(lab.subject.tasks, limit=2), [1, 2, 4, 8, 16]  # of eight tasks


def _joules(cell: CellResult, meter: str, part: str = "joules") -> float:
    """Of all batches of a repeat, averaged over the repeats."""
    readings: list[Any] = [repeat.readings[meter][part] for repeat in cell.repeats]
    return fmean(readings)


def _joules_per_batch(cell: CellResult, meter: str) -> float:
    return _joules(cell, meter) / len(cell.repeats[0].batches)


def _joules_per_token(cell: CellResult, meter: str, part: str = "joules") -> float:
    return _joules(cell, meter, part) / cell.repeats[0].tokens


RECIPE = Recipe(
    "mjsd-table-1",
    "Energy of a run by batch size",
    "Qin et al. (MJSD), 2024, table 1",
    "A batch 16 times as large takes 1.75 times the energy.",
    measure,
    MODELS,
)
