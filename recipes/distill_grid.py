"""Compares divergences and kinds of data for distilling a draft: a grid of small runs.

    python -m recipes.distill_grid --out DIR

Four divergences times four kinds of data, and training on the ground truth alone as a baseline, all
with the same start, the same steps and the same tokens in each step.  α is measured at temperature
1 on held-out prompts, along the target's own answers, which are the same for all cells; intervals
are 95 % bootstrap intervals over prompts, and differences are resampled in pairs.

The default target is the embedded one, with source files of the standard library as prompts; the
draft has one layer.  Each cell takes a few minutes on two cores.  Cells share a cache of the
target's answers and probabilities.  Finished cells are kept, and an interrupted one is resumed, so
the command can be repeated after any interruption.

Writes grid.json, grid.md, grid.png and grid.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from outrider.lab.markdown import markdown_table
from outrider.lab.metadata import run_metadata
from outrider.lab.plots import canvas, require_matplotlib, save
from outrider.runtime import HFModel
from outrider.train.corpus import STDLIB, collect
from outrider.train.distill.measure import Acceptance
from outrider.train.distill.result import History
from outrider.train.distill.run import distil, load_target
from outrider.train.distill.settings import (
    CROSS_ENTROPY,
    DRAFT,
    EMBEDDED,
    GROUND_TRUTH,
    MIXTURE,
    TARGET,
    Data,
    Distillation,
    Measuring,
    Start,
)
from outrider.train.distill.shape import Shape
from outrider.train.loop import Interrupted, Settings
from outrider.train.optim import Schedule

DIVERGENCES = ("forward-kl", "reverse-kl", "js", "tv")
DATA = (GROUND_TRUTH, TARGET, DRAFT, MIXTURE)
BASELINE = (CROSS_ENTROPY, GROUND_TRUTH)
COMPARED = ("forward-kl", TARGET)  # chosen before the results
TEMPERATURE = 1.0
RESAMPLES = 2000
MAX_TEXT_BYTES = 600_000


@dataclass(frozen=True)
class Size:
    """The size of the grid's runs.

    Attributes:
        steps: of each cell.
        rows: of a step.
        length: tokens of a row, which are one prompt with its answer, or several.
        prompt_tokens: of these, the prompt.
        held_out: prompts to measure on.
        refresh_every: steps between two samplings of the draft.
        refresh_prompts: prompts that it then answers.
        layers: of the draft.
        width: of the draft.
        learning_rate: at its peak.
        max_prompts: most prompts to train on.
    """

    steps: int = 200
    rows: int = 8
    length: int = 256
    prompt_tokens: int = 32
    held_out: int = 64
    refresh_every: int = 20
    refresh_prompts: int = 64
    layers: int = 1
    width: int = 256
    learning_rate: float = 3e-3
    max_prompts: int = 1500


@dataclass(frozen=True)
class Cell:
    """The result of one run.

    Attributes:
        divergence, data: what it was.
        alpha: at temperature 1, after the last step.
        low, high: its interval.
        acceptance_length: of speculative decoding.
        tokens: trained on.
    """

    divergence: str
    data: str
    alpha: float
    low: float
    high: float
    acceptance_length: float
    tokens: int


def texts(folder: Path) -> Path:
    """Source files of the standard library, as a folder of texts."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        (source,) = collect((STDLIB,), MAX_TEXT_BYTES)
        for number, document in enumerate(source.documents):
            (partial / f"{number:05d}.py").write_text(document.text, encoding="utf-8")
        partial.rename(folder)
    return folder


def cell_run(
    target: HFModel, prompts: Path, out: Path, divergence: str, data: str, size: Size
) -> Distillation:
    """The run of a cell."""
    steps = size.steps
    return Distillation(
        target,
        out / "cells" / f"{divergence}-{data}",
        Data(
            prompts,
            kind=data,
            max_prompts=size.max_prompts,
            prompt_tokens=size.prompt_tokens,
            answer_tokens=size.length - size.prompt_tokens,
            refresh_every=size.refresh_every,
            refresh_prompts=size.refresh_prompts,
        ),
        Start(shape=Shape(size.layers, size.width)),
        Settings(
            Schedule(size.learning_rate, steps, min(20, steps // 10), steps // 3),
            dtype=torch.bfloat16,
            checkpoint_every=20,
            validate_every=steps,
        ),
        divergence,
        rows=size.rows,
        length=size.length,
        temperature=TEMPERATURE,
        measuring=Measuring((TEMPERATURE,), size.held_out, size.length // 2),
        cache=out / "cache",
    )


def run_grid(
    target: HFModel, prompts: Path, out: Path, size: Size, console: Console
) -> dict[tuple[str, str], Acceptance]:
    """Trains and measures all cells, and returns the acceptance after the last step of each."""
    measured = {}
    cells = [BASELINE, *((divergence, data) for data in DATA for divergence in DIVERGENCES)]
    for number, (divergence, data) in enumerate(cells, 1):
        run = cell_run(target, prompts, out, divergence, data, size)
        console.rule(f"{number} of {len(cells)}: {divergence} on {data}")
        distil(run, console, "python -m recipes.distill_grid")
        (measured[divergence, data],) = History(run.out).measurements[-1].at
    return measured


def resampled(counts: Sequence[int], sums: Sequence[float], seed: int = 0) -> np.ndarray:
    """α of bootstrap resamples of the prompts, (RESAMPLES,).  Equal seeds and lengths take the same
    prompts, so differences of two results are paired."""
    generator = np.random.Generator(np.random.Philox(seed))
    chosen = generator.integers(0, len(counts), (RESAMPLES, len(counts)))
    return np.asarray(sums)[chosen].sum(1) / np.asarray(counts)[chosen].sum(1)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The central 95 % of the values."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def tabulated(
    measured: Mapping[tuple[str, str], Acceptance], tokens: Mapping[tuple[str, str], int]
) -> list[Cell]:
    """The cells with their intervals."""
    return [
        Cell(
            divergence,
            data,
            at.alpha,
            *interval(resampled(at.counts, at.sums)),
            at.acceptance_length,
            tokens[divergence, data],
        )
        for (divergence, data), at in measured.items()
    ]


def compared(
    measured: Mapping[tuple[str, str], Acceptance],
    tokens: Mapping[tuple[str, str], int],
    cell: tuple[str, str],
) -> dict[str, object]:
    """How far the α of a cell is above the baseline's."""
    ours, base = measured[cell], measured[BASELINE]
    differences = resampled(ours.counts, ours.sums) - resampled(base.counts, base.sums)
    low, high = interval(differences)
    return {
        "distilled": " on ".join(cell),
        "baseline": " on ".join(BASELINE),
        "tokens": tokens[cell],
        "baseline_tokens": tokens[BASELINE],
        "difference": ours.alpha - base.alpha,
        "low": low,
        "high": high,
    }


def markdown(document: Mapping[str, object], cells: Sequence[Cell]) -> str:
    """The grid as a table, and the comparison with the baseline."""
    found = {(cell.divergence, cell.data): cell for cell in cells}

    def entry(divergence: str, data: str) -> str:
        cell = found[divergence, data]
        return f"{cell.alpha:.3f} [{cell.low:.3f}, {cell.high:.3f}]"

    lines = [
        "# α at temperature 1 by divergence and data",
        "",
        "95 % bootstrap intervals over held-out prompts in brackets.",
        "",
    ]
    rows = [[each, *(entry(each, data) for data in DATA)] for each in DIVERGENCES]
    rows.append([f"{BASELINE[0]} (no target)", entry(*BASELINE), *[""] * (len(DATA) - 1)])
    lines += [*markdown_table(("divergence", *DATA), rows), ""]
    trained = [
        (data, ", ".join(f"{each} {found[each, data].tokens:,}" for each in DIVERGENCES))
        for data in DATA
    ]
    lines += markdown_table(("data", "tokens trained on, by divergence"), trained, left=2)
    lines.append("")
    for difference in document["differences"]:  # type: ignore[attr-defined]
        lines.append(
            f"{difference['distilled']}, {difference['tokens']:,} tokens: α is "
            f"{difference['difference']:+.3f} [{difference['low']:+.3f}, "
            f"{difference['high']:+.3f}] against {difference['baseline']}, "
            f"{difference['baseline_tokens']:,} tokens."
        )
        lines.append("")
    return "\n".join(lines)


def heat_map(cells: Sequence[Cell], out: Path) -> None:
    """Draws the grid as grid.png and grid.svg."""
    found = {(cell.divergence, cell.data): cell for cell in cells}
    alpha = np.array([[found[d, data].alpha for data in DATA] for d in DIVERGENCES])
    with canvas((8.4, 5.4)) as figure:
        axes = figure.add_subplot()
        image = axes.imshow(alpha, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(DATA)), DATA)
        axes.set_yticks(range(len(DIVERGENCES)), DIVERGENCES)
        axes.set_xlabel("data")
        axes.set_ylabel("divergence")
        middle = (alpha.min() + alpha.max()) / 2
        for row, divergence in enumerate(DIVERGENCES):
            for column, data in enumerate(DATA):
                cell = found[divergence, data]
                axes.text(
                    column,
                    row,
                    f"{cell.alpha:.3f}\n[{cell.low:.3f}, {cell.high:.3f}]",
                    ha="center",
                    va="center",
                    color="black" if cell.alpha > middle else "white",
                )
        base = found[BASELINE]
        axes.set_title(
            "α at temperature 1, with 95 % intervals\n"
            f"trained on the ground truth without the target: {base.alpha:.3f}"
        )
        figure.colorbar(image, ax=axes, label="α")
        for name in ("grid.png", "grid.svg"):
            save(figure, out / name, "recipes.distill_grid")


def write_results(
    measured: Mapping[tuple[str, str], Acceptance],
    tokens: Mapping[tuple[str, str], int],
    out: Path,
    **settings: object,
) -> dict[str, object]:
    """Writes the documents and the figure; returns the document."""
    cells = tabulated(measured, tokens)
    grid = [cell for cell in cells if (cell.divergence, cell.data) != BASELINE]
    best = max(grid, key=lambda cell: cell.alpha)
    chosen = dict.fromkeys([COMPARED, (best.divergence, best.data)])
    document: dict[str, object] = {
        "about": run_metadata(**settings),
        "cells": [asdict(cell) for cell in cells],
        "differences": [compared(measured, tokens, cell) for cell in chosen],
    }
    (out / "grid.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "grid.md").write_text(markdown(document, cells), encoding="utf-8")
    heat_map(cells, out)
    return document


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare divergences and data of distillation.")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--target", default=EMBEDDED, help="folder or id (default: embedded)")
    parser.add_argument(
        "--prompts", type=Path, help="folder of texts, or JSON lines with answers (default: stdlib)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, … (default: auto)")
    parser.add_argument("--dtype", help="of the target (default: bfloat16 if the hardware has it)")
    for name, value in asdict(Size()).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(value), default=value, help=f"(default: {value})")
    given = vars(parser.parse_args(arguments))
    out, console = given.pop("out"), Console(stderr=True)
    require_matplotlib()
    out.mkdir(parents=True, exist_ok=True)
    source = given.pop("target")
    target = load_target(source, given.pop("device"), given.pop("dtype"))
    prompts = given.pop("prompts") or texts(out / "texts")
    size = Size(**given)
    try:
        measured = run_grid(target, prompts, out, size, console)
    except Interrupted as stop:
        console.print(f"stopped after step {stop}; run the same command again to continue")
        raise SystemExit(130) from None
    tokens = {
        cell: History(cell_run(target, prompts, out, *cell, size).out).measurements[-1].tokens
        for cell in measured
    }
    write_results(measured, tokens, out, target=source, size=asdict(size))
    console.print((out / "grid.md").read_text(), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
