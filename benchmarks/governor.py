"""The governor beside plain decoding and fixed draft lengths.

    python -m benchmarks.governor [--compile auto] [--quick]

Cells: temperature x text x draft x batch size, on the embedded pair or another one (``--target``,
``--draft``, which may be a head). In each cell plain decoding, each fixed length and the governor
take turns. Reported are the governor's tokens per second over plain decoding's, and over those of
the best fixed length; the bars are 0.97 and, where speculation pays, 0.95. The poor and the useless
draft are the draft model with noise in its weights. Two steps are recorded besides: the draft's
weights are replaced, and rows join and leave, while the batch runs.

Each cell is written when it is measured; a run that is started again goes on after the last one.
Run it on an idle machine.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import outrider
from benchmarks import page
from outrider import METHODS, Engine, Sampling, assets
from outrider.drafters.heads.kinds import format_of
from outrider.engine import Row, Scheduler
from outrider.engine.warming import warm_up
from outrider.lab.metadata import command_line

TEMPERATURES = (0.0, 0.8, 1.2)
TEXTS = ("code", "chat", "copies", "random")
NOISE = {"good": 0.0, "poor": 0.15, "useless": 2.0}
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (1, 2, 3, 5, 8)
PLAIN, GOVERNED = "plain", "auto"
ADAPTS_WITHIN = 20  # rounds, which the plot of the step responses shades

_CODE = (
    "def fibonacci(n):\n    ",
    "import os\n\ndef read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "def merge(left, right):\n    result = []\n    ",
)
_CHAT = (
    "Q: Why do cats purr?\nA:",
    "Q: How does a bicycle stay upright?\nA:",
    "Q: What should I cook tonight?\nA:",
    "Q: Who wrote the first compiler?\nA:",
)
_COPIED = "names = ['Ada', 'Grace', 'Edsger', 'Barbara', 'Donald', 'Tony', 'John', 'Alan']\n"


def prompts_of(text: str, rows: int, num_tokens: int) -> list[Any]:
    """Prompts of one kind, each a little different from the others."""
    if text == "random":
        generator = torch.Generator().manual_seed(rows)
        return torch.randint(num_tokens, (rows, 24), generator=generator).tolist()
    if text == "copies":
        return [f"# {row}\n" + _COPIED * 4 for row in range(rows)]
    some = _CODE if text == "code" else _CHAT
    return [f"# {row}\n{some[row % len(some)]}" for row in range(rows)]


def add_noise(module: nn.Module, noise: float) -> None:
    """Adds normal noise to each matrix, relative to its standard deviation. Changes the weights in
    place, where compiled programs read them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1 and noise:
                draws = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(noise * weight.float().std().to(weight) * draws)


def drafting_module(engine: Engine) -> nn.Module:
    """The weights of an engine's draft model or head. Each engine has its own copy of a head."""
    if engine.draft is not None:
        return engine.draft.module
    (model,) = engine.drafter.capabilities.models
    network: nn.Module = model.network  # without the embeddings, which are the target's
    return network


def engines_of(options: argparse.Namespace, noise: float) -> dict[str, Engine]:
    """The engines that are compared, on the same models. A draft model is loaded by itself, so that
    its weights stay where they may be changed."""
    draft = options.draft or assets.draft_path()
    is_head = format_of(draft) is not None
    governed = outrider.load(
        options.target,
        draft if is_head else outrider.load_model(draft, dtype=options.dtype),
        num_speculative_tokens="auto",
        compile=options.compile,
        dtype=options.dtype,
        max_batch_size=max(options.batches),
    )
    found = {PLAIN: governed.with_method(METHODS["plain"])}
    for length in options.lengths:
        found[str(length)] = governed.with_method(governed.method, num_speculative_tokens=length)
    found[GOVERNED] = governed
    for engine in found.values():
        warm_up(engine)
    modules = [drafting_module(each) for name, each in found.items() if name != PLAIN]
    for module in dict.fromkeys(modules):
        add_noise(module, noise)
    return found


def speed(engine: Engine, prompts: Sequence[Any], sampling: Sampling) -> float:
    """Tokens per second of a generation."""
    began = time.perf_counter()
    results = engine.generate(prompts, sampling)
    return results.stats.emitted / (time.perf_counter() - began)


def measure(
    engines: dict[str, Engine], prompts: Sequence[Any], sampling: Sampling, repeats: int
) -> dict[str, Any]:
    """The median speeds of a cell, and the governor's ratios. The first turn warms up and is left
    out; the governor keeps what it has learned, as in use."""
    turns: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(repeats + 1):
        for name in names[:: 1 if turn % 2 else -1]:
            turns[name].append(speed(engines[name], prompts, sampling))
    speeds = {name: median(times[1:]) for name, times in turns.items()}
    fixed = [each for name, each in speeds.items() if name not in (PLAIN, GOVERNED)]
    stats = engines[GOVERNED].generate(prompts, sampling).stats
    return {
        "speeds": speeds,
        "over_plain": speeds[GOVERNED] / speeds[PLAIN],
        "over_best": speeds[GOVERNED] / max(fixed),
        "speculation_pays": max(fixed) > speeds[PLAIN],
        "draft_lengths": stats.draft_lengths,
        "probe_share": stats.probe_share,
    }


def steps(engine: Engine, options: argparse.Namespace) -> dict[str, list[float]]:
    """Mean draft length of each round, while the draft of one row, at temperature 0.8, gets useless
    and good again, and while the batch grows from 2 rows to the largest and shrinks again."""
    module = drafting_module(engine)
    kept = [weight.clone() for weight in module.parameters()]

    def restore() -> None:
        with torch.no_grad():
            for weight, old in zip(module.parameters(), kept, strict=True):
                weight.copy_(old)

    def spoil() -> None:
        add_noise(module, NOISE["useless"])

    num, rounds = max(options.batches), options.step_rounds
    sampling = Sampling(temperature=0, max_new_tokens=64 * rounds, ignore_eos=True)
    short = Sampling(temperature=0, max_new_tokens=rounds, ignore_eos=True)
    found: dict[str, list[float]] = {}

    scheduler = engine.new_scheduler()
    sampled = Sampling(temperature=0.8, max_new_tokens=64 * rounds, ignore_eos=True, seed=1)
    for prompt in prompts_of("code", 1, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, sampled))
    changes: tuple[Any, ...] = (None, spoil, restore)
    found["draft"], asked = [], Asked()
    for change in changes:
        if change is not None:
            change()
        found["draft"] += asked.lengths(scheduler, rounds)

    scheduler = engine.new_scheduler()
    for prompt in prompts_of("code", 2, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, sampling))
    asked = Asked()
    found["batch"] = asked.lengths(scheduler, rounds)
    for prompt in prompts_of("code", num - 2, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, short))
    found["batch"] += asked.lengths(scheduler, 2 * rounds)
    return found


class Asked:
    """Reads from the statistics of running rows what each round was asked to draft."""

    def __init__(self) -> None:
        self._before: dict[Row, int] = {}

    def lengths(self, scheduler: Scheduler, rounds: int) -> list[float]:
        """The mean draft length in each of the next rounds."""
        found: list[float] = []
        while len(found) < rounds and (scheduler.num_running or scheduler.num_waiting):
            rows = [each.row for each in scheduler.step() if not each.row.over]
            now = {row: _asked(row.stats.draft_lengths) for row in rows}
            grown = [total - self._before.get(row, 0) for row, total in now.items()]
            self._before = now
            if grown:
                found.append(sum(grown) / len(grown))
        return found


def _asked(histogram: Sequence[int]) -> int:
    return sum(length * count for length, count in enumerate(histogram))


def cells(options: argparse.Namespace) -> Iterable[tuple[float, str, int]]:
    """All combinations of temperature, text and batch size."""
    return itertools.product(options.temperatures, options.texts, options.batches)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, rows = report["about"], report["cells"]
    worst = min(rows.values(), key=lambda row: row["over_plain"])
    lines = page.header(
        "The governor beside plain decoding and fixed draft lengths",
        about,
        f"slowest cell: {worst['over_plain']:.3f} of plain decoding.",
    )
    heads = ("draft", "temperature", "text", "batch", "plain, tok/s", "governor", "over plain")
    heads += ("best fixed length", "over best")
    lines += page.table(heads, (_line(key, row) for key, row in rows.items()), left=3)
    return "\n".join(lines) + "\n"


def _line(key: str, row: dict[str, Any]) -> tuple[str, ...]:
    speeds = row["speeds"]
    fixed = [name for name in speeds if name not in (PLAIN, GOVERNED)]
    return (
        *key.split(", "),
        f"{speeds[PLAIN]:.0f}",
        f"{speeds[GOVERNED]:.0f}",
        f"{row['over_plain']:.3f}",
        max(fixed, key=lambda name: speeds[name]),
        f"{row['over_best']:.3f}" if row["speculation_pays"] else "-",
    )


def draw(report: dict[str, Any], heat_map: Path, response: Path) -> None:
    """Draws the ratios over plain decoding, and the draft lengths after the steps."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from outrider.lab.plots import BLUE

    rows = report["cells"]
    batches = sorted({int(key.rsplit(", ", 1)[1]) for key in rows})
    kinds = list(dict.fromkeys(key.rsplit(", ", 1)[0] for key in rows))
    ratios = [
        [rows.get(f"{kind}, {batch}", {}).get("over_plain", float("nan")) for batch in batches]
        for kind in kinds
    ]
    with mpl.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 1.6 + 0.24 * len(kinds)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(ratios, cmap="RdBu", vmin=0, vmax=2, aspect="auto")
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_yticks(range(len(kinds)), kinds)
        axes.set_xlabel("batch size")
        axes.set_title("governor over plain decoding, tokens per second")
        for y, line in enumerate(ratios):
            for x, ratio in enumerate(line):
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=7)
        figure.colorbar(image)
        figure.savefig(heat_map, metadata={"Date": None, "Creator": "benchmarks.governor"})

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        for axes, (name, lengths) in zip(
            figure.subplots(2, 1), report["steps"].items(), strict=True
        ):
            axes.step(range(len(lengths)), lengths, where="post", color=BLUE)
            for change in range(report["step_rounds"], len(lengths), report["step_rounds"]):
                axes.axvspan(change, change + ADAPTS_WITHIN, alpha=0.15, color=BLUE, linewidth=0)
            axes.set_ylabel("draft length")
            axes.set_xlabel(f"round; the {name} changes every {report['step_rounds']} rounds")
        figure.savefig(response, metadata={"Date": None, "Creator": "benchmarks.governor"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures what is missing, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--compile", choices=["off", "auto"], default="auto")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per row")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-rounds", type=int, default=60)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=TEXTS)
    parser.add_argument("--drafts", choices=list(NOISE), nargs="+", default=list(NOISE))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--name", default="governor", help="name of the report")
    parser.add_argument("--quick", action="store_true", help="one small cell, to see it work")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.repeats, options.step_rounds = 8, 1, 6
        options.temperatures, options.texts, options.drafts = [0.0], ["code"], ["good"]
        options.batches, options.lengths = [2], [2]
    file = options.out / f"{options.name}.json"
    report: dict[str, Any] = {"cells": {}}
    if file.exists():
        report = json.loads(file.read_text(encoding="utf-8"))
    report["about"] = page.about(command_line(), repeats=options.repeats, tokens=options.tokens)
    for draft in options.drafts:
        engines: dict[str, Engine] | None = None
        for temperature, text, batch in cells(options):
            key = f"{draft}, {temperature:g}, {text}, {batch}"
            if key in report["cells"]:
                continue
            engines = engines or engines_of(options, NOISE[draft])
            prompts = prompts_of(text, batch, engines[GOVERNED].target.num_tokens)
            sampling = Sampling(
                temperature=temperature, max_new_tokens=options.tokens, ignore_eos=True, seed=1
            )
            report["cells"][key] = measure(engines, prompts, sampling, options.repeats)
            page.write(options.out, options.name, report, markdown(report))
    if "steps" not in report:
        report["step_rounds"] = options.step_rounds
        report["steps"] = steps(engines_of(options, 0.0)[GOVERNED], options)
    page.publish(options.out, options.name, report, markdown(report))
    draw(report, file.with_suffix(".svg"), options.out / f"{options.name}_steps.svg")


if __name__ == "__main__":
    main()
