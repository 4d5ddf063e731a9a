"""Measures what distillation gains over training on other people's answers.

    python -m recipes.distill_gain --ground-truth FILE --answers FILE --out DIR

The same small draft is trained from the same start on answers to the same prompts, over the same
number of answer tokens:

    cross-entropy on ground-truth   on the tokens of the answers that came with the prompts
    forward-kl on target            on the target's distributions along its own answers
    ...                             other divergences, and the two cells between

``--ground-truth`` has lines {"prompt": ..., "answer": ...}. ``--answers`` has the target's own
answers to the same prompts, {"messages": [...], "temperature": ...}, as ``self_chat.py`` writes
them. One prompt in four, chosen by hash, is held out; α is measured along the target's answers to
these at temperature 1. Intervals are 95 % bootstrap intervals over answers, and differences are
resampled in pairs.

Human answers are shorter, so a step has fewer of their tokens; the cells on them take more steps
over the same number of tokens. Finished cells are kept, and an interrupted one is resumed.

Writes distill_gain.json and distill_gain.md. On one core each cell takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.lab.markdown import markdown_table
from outrider.lab.metadata import run_metadata
from outrider.runtime import HFModel, load_model
from outrider.train.distill.answers import ground_truth
from outrider.train.distill.measure import Acceptance, overlap
from outrider.train.distill.packing import assign
from outrider.train.distill.prompts import Prompt, Reader, key_of, split
from outrider.train.distill.result import LAST, History
from outrider.train.distill.run import distil, load_target
from outrider.train.distill.sample import Sample
from outrider.train.distill.settings import (
    CROSS_ENTROPY,
    GROUND_TRUTH,
    TARGET,
    Data,
    Distillation,
    Measuring,
    Start,
)
from outrider.train.loop import Interrupted, Settings
from outrider.train.optim import Schedule
from recipes.distill_grid import interval, resampled
from recipes.self_chat import read
from recipes.smollm2_draft import LEARNING_RATE, SHAPE

Cell = tuple[str, str]
"""A divergence and the data it is used on."""

BASELINE: Cell = (CROSS_ENTROPY, GROUND_TRUTH)
CELLS: tuple[Cell, ...] = (
    BASELINE,
    ("forward-kl", TARGET),
    ("lk", TARGET),
    (CROSS_ENTROPY, TARGET),
    ("forward-kl", GROUND_TRUTH),
)
HELD_OUT_ONE_IN = 4
TEMPERATURE = 1.0
ROWS, LENGTH = 4, 512


@dataclass(frozen=True)
class Files:
    """The data of both kinds, over the same prompts.

    Attributes:
        train: by kind, the answers to train on.
        held_out: the target's answers to other prompts at temperature 1.
    """

    train: dict[str, Path]
    held_out: Path


def prepare(ground_truth_file: Path, answers_file: Path, out: Path) -> Files:
    """Writes the answers to the prompts that both files have, split by the hash of the prompt.

    Raises:
        SystemExit: the files have no prompt in common, or none that is held out has an answer at
            temperature 1.
    """
    human = {line["prompt"].strip(): line["answer"] for line in read(ground_truth_file)}
    chats = [line for line in read(answers_file) if len(line["messages"]) == 2]
    own = [(chat["messages"][0]["content"].strip(), chat) for chat in chats]
    own = [(prompt, chat) for prompt, chat in own if prompt in human]
    train = [pair for pair in own if not _is_held_out(pair[0])]
    held_out = [
        chat for prompt, chat in own if _is_held_out(prompt) and chat["temperature"] == TEMPERATURE
    ]
    if not train or not held_out:
        raise SystemExit(
            f"{ground_truth_file} and {answers_file} have {len(own)} prompts in common, "
            f"{len(held_out)} of them held out with an answer at temperature 1: take files over "
            f"the same prompts, of twenty or more"
        )
    prompts = dict.fromkeys(prompt for prompt, _ in train)
    files = Files(
        {GROUND_TRUTH: out / "ground_truth.jsonl", TARGET: out / "target.jsonl"},
        out / "held_out.jsonl",
    )
    _write(files.train[GROUND_TRUTH], [{"prompt": p, "answer": human[p]} for p in prompts])
    _write(files.train[TARGET], [chat for _, chat in train])
    _write(files.held_out, held_out)
    return files


def samples_of(file: Path, target: HFModel) -> tuple[list[Prompt], list[Sample]]:
    """The prompts of a file, and their answers as tokens."""
    assert target.tokenizer is not None
    prompts = Reader(target.tokenizer, target.name, window=LENGTH).read(file)
    return prompts, ground_truth(prompts, LENGTH)


def steps_over(file: Path, target: HFModel, budget: int) -> int:
    """The steps that train on about so many answer tokens."""
    train, _ = split(samples_of(file, target)[0])  # as the distillation splits them
    samples = ground_truth(train, LENGTH)
    rows = assign([each.num_inputs for each in samples], range(len(samples)), LENGTH)
    per_step = ROWS * sum(each.num_positions for each in samples) / len(rows)
    return max(1, round(budget / per_step))


def cell_run(target: HFModel, file: Path, out: Path, cell: Cell, steps: int) -> Distillation:
    """The run of a cell. The answers of either kind come with their prompts."""
    return Distillation(
        target,
        out / "cells" / "-".join(cell),
        Data(file, kind=GROUND_TRUTH),
        Start(shape=SHAPE),
        Settings(
            Schedule(LEARNING_RATE, steps, min(20, steps // 10), steps // 2),
            dtype=torch.bfloat16,
            checkpoint_every=10,
            validate_every=steps,
        ),
        cell[0],
        rows=ROWS,
        length=LENGTH,
        temperature=TEMPERATURE,
        measuring=Measuring((TEMPERATURE,), prompts=2, tokens=16),  # see `measured`
        cache=out / "cache",
    )


def measured(target: HFModel, folder: Path, held_out: Sequence[Sample]) -> Acceptance:
    """α of a draft along held-out answers; other numbers of its acceptance are not measured."""
    draft = load_model(folder, role="draft")
    sums = tuple(overlap(target.module, draft.module, each, TEMPERATURE) for each in held_out)
    counts = tuple(each.num_positions for each in held_out)
    nothing = float("nan")
    return Acceptance(TEMPERATURE, sum(sums) / sum(counts), nothing, nothing, sums, counts)


def compared(ours: Acceptance, base: Acceptance) -> dict[str, float]:
    """How far α is above the baseline's."""
    differences = resampled(ours.counts, ours.sums) - resampled(base.counts, base.sums)
    low, high = interval(differences)
    return {"gain": ours.alpha - base.alpha, "gain_low": low, "gain_high": high}


def row_of(cell: Cell, at: Acceptance, base: Acceptance, steps: int, tokens: int) -> dict[str, Any]:
    """A cell's line of the result."""
    low, high = interval(resampled(at.counts, at.sums))
    found = {"loss": cell[0], "data": cell[1], "steps": steps, "tokens": tokens}
    return found | {"alpha": at.alpha, "low": low, "high": high} | compared(at, base)


def markdown(document: dict[str, Any]) -> str:
    """The result as a table."""
    about = document["about"]
    lines = [
        "# What distillation gains",
        "",
        f"α at temperature {TEMPERATURE:g} of a draft of {SHAPE.layers} layers and width "
        f"{SHAPE.width}, along {about['held_out']} answers of the target to held-out prompts; "
        "95 % bootstrap intervals over answers. The gain is against the first line, paired.",
        "",
    ]
    rows = [
        (
            row["loss"],
            row["data"],
            row["steps"],
            f"{row['tokens']:,}",
            f"{row['alpha']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            f"{row['gain']:+.3f} [{row['gain_low']:+.3f}, {row['gain_high']:+.3f}]",
        )
        for row in document["cells"]
    ]
    lines += markdown_table(("loss", "data", "steps", "tokens", "α", "gain"), rows, left=2)
    lines += ["", f"Target: {about['target']}. {about['hardware']}. `{about['command']}`", ""]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare distillation with ground truth.")
    parser.add_argument("--ground-truth", type=Path, required=True, help="prompts with answers")
    parser.add_argument("--answers", type=Path, required=True, help="the target's own answers")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--target", default="runs/smollm2/model", help="folder or hub id")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="of the target")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--tokens", type=int, default=60_000, help="answer tokens of each cell")
    parser.add_argument("--cells", type=int, default=2, help=f"how many of {len(CELLS)} cells")
    given = parser.parse_args(arguments)
    out, console = given.out, Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    files = prepare(given.ground_truth, given.answers, out)
    target = load_target(given.target, dtype=given.dtype)
    _, held_out = samples_of(files.held_out, target)
    found: dict[Cell, Acceptance] = {}
    rows = []
    for cell in CELLS[: given.cells]:
        file = files.train[cell[1]]
        steps = steps_over(file, target, given.tokens)
        run = cell_run(target, file, out, cell, steps)
        console.rule(f"{cell[0]} on {cell[1]}: {steps} steps")
        try:
            distil(run, console, "python -m recipes.distill_gain")
        except Interrupted as stop:
            console.print(f"stopped after step {stop}; run the same command again to continue")
            raise SystemExit(130) from None
        found[cell] = measured(target, run.out / LAST, held_out)
        tokens = History(run.out).measurements[-1].tokens
        rows.append(row_of(cell, found[cell], found[BASELINE], steps, tokens))
        about = run_metadata(
            target=given.name,
            draft=asdict(SHAPE),
            held_out=len(held_out),
            learning_rate=LEARNING_RATE,
            seeds=1,
            command="python -m recipes.distill_gain --ground-truth FILE --answers FILE --out DIR "
            f"--tokens {given.tokens} --cells {given.cells}",
        )
        document = {"about": about, "cells": rows}
        (out / "distill_gain.json").write_text(json.dumps(document, indent=1) + "\n")
        (out / "distill_gain.md").write_text(markdown(document))
    console.print((out / "distill_gain.md").read_text(), markup=False, highlight=False)


def _is_held_out(prompt: str) -> bool:
    return int(key_of(prompt)[:8], 16) % HELD_OUT_ONE_IN == 0


def _write(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
