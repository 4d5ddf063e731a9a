"""The governor beside plain decoding and fixed draft lengths.

    python -m benchmarks.governor [--compile auto] [--minutes 11] [--quick]

Cells: temperature x text x draft x batch size, on the embedded pair or another one (``--target``,
``--draft``, which may be a head). In each cell plain decoding, each fixed length and the governor
generate 128 tokens for each prompt side by side, a few tokens of one after a few of another
(``side_by_side.py``). They do so in turns, each with another seed, until the cell's seconds are
spent. What counts is the median over the turns of the governor's tokens per second over plain
decoding's in the same turn, with a bootstrap interval of 90 %, and likewise over the fixed length
that is the best in the cell. The number of turns is even: in some cells an engine is several
percent faster in every other one, so that the median of an odd number would be one of the two. The
best of several lengths in the same turns would be too fast by chance, so the turns are halved, and
each is compared with the length that is the best in the other half. The bars are 0.97 and, where
speculation pays, 0.95; a cell whose interval holds the bar is undecided.
Speculation pays where the lower end of the interval of that length is above plain decoding. Shorter
outputs measure the governor's first rounds: one probe is 1.5 % of 64.

The poor and the useless draft are the draft model with noise in its weights. They are read from
folders, since our kernels do not pack the weights of a model in memory. The first turn of each
cell warms up and is left out; the governor keeps what it has learned from one cell to the next, as
in use. Two steps are recorded besides (``governor_steps.py``).

Each cell is written when it is measured; a run that is started again goes on after the last one,
and ``--minutes`` ends it after so many. Run it on an idle machine. On a processor that does other
work, ``--clock processor`` counts the time that this process had a processor, which is that of one
thread: the speeds are then those of a processor of its own, and the governor sees the same clock.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import outrider
from benchmarks import page, side_by_side
from benchmarks.governor_cases import NOISE, add_noise, drafting_module, prompts_of
from benchmarks.governor_steps import draw_steps, steps, summary
from outrider import METHODS, Engine, Sampling, assets
from outrider.drafters.heads.kinds import format_of
from outrider.engine.warming import warm_up
from outrider.lab.metadata import command_line

TEMPERATURES = (0.0, 0.8, 1.2)
TEXTS = ("code", "chat", "copies", "random")
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (1, 2, 3, 5)
PLAIN, GOVERNED = "plain", "auto"
OVER_PLAIN, OVER_BEST = 0.97, 0.95  # the bars
_LEAST_TURNS = 4
_RESAMPLES = 2000
_SHOWN = "over_plain", "over_best"
_DARK = 0.2  # ratios that differ from 1 by more have dark colours


def engines_of(
    options: argparse.Namespace, draft: str | Path, noise: float = 0.0
) -> dict[str, Engine]:
    """The engines that are compared, on the same models.

    Args:
        options: of the command line.
        draft: the folder of a draft model or head.
        noise: to add to the weights of a head.
    """
    governed = outrider.load(
        options.target,
        draft,
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
    if noise:
        modules = [drafting_module(each) for name, each in found.items() if name != PLAIN]
        for module in dict.fromkeys(modules):
            add_noise(module, noise)
    return found


def noisy_draft(source: str | Path, noise: float, dtype: str | None, folder: Path) -> str | Path:
    """The folder of a draft model with noise in its weights."""
    if not noise:
        return source
    model = outrider.load_model(source, dtype=dtype)
    add_noise(model.module, noise)
    model.module.save_pretrained(folder)
    assert model.tokenizer is not None
    model.tokenizer.save_pretrained(folder)
    return folder


class Ratio(NamedTuple):
    """The median of ratios, and the ends of its bootstrap interval of 90 %."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Sequence[float], below: Sequence[float]) -> "Ratio":
        """Of the ratios of numbers that were measured in the same turns."""
        ratios = [a / b for a, b in zip(above, below, strict=True)]
        drawn = random.Random(0)
        medians = sorted(median(drawn.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
        ends = medians[_RESAMPLES // 20], medians[-1 - _RESAMPLES // 20]
        return cls(median(ratios), *ends)


def measure(
    engines: dict[str, Engine], prompts: Sequence[Any], sampling: Sampling, seconds: float
) -> dict[str, Any]:
    """The speeds of a cell by turn, the ratios, and what the governor asked for.

    Args:
        engines: by name.
        prompts: of all turns.
        sampling: its seed is the number of the turn.
        seconds: no turn begins after so many, once there are some.
    """
    turns: dict[str, list[float]] = {name: [] for name in engines}
    began, turn = time.perf_counter(), 0
    while turn <= _LEAST_TURNS or turn % 2 == 0 or time.perf_counter() - began < seconds:
        seeded = replace(sampling, seed=turn)
        for name, speed in side_by_side.speeds(engines, prompts, seeded).items():
            turns[name].append(speed)
        turn += 1
    speeds = {name: each[1:] for name, each in turns.items()}
    fixed = [name for name in speeds if name not in (PLAIN, GOVERNED)]
    best = best_elsewhere([speeds[name] for name in fixed])
    stats = engines[GOVERNED].generate(prompts, sampling).stats
    return {
        "speeds": speeds,
        "best": max(fixed, key=lambda name: median(speeds[name])),
        "over_plain": Ratio.of(speeds[GOVERNED], speeds[PLAIN]),
        "over_best": Ratio.of(speeds[GOVERNED], best),
        "best_over_plain": Ratio.of(best, speeds[PLAIN]),
        "draft_lengths": stats.draft_lengths,
        "probe_share": stats.probe_share,
    }


def best_elsewhere(speeds: Sequence[Sequence[float]]) -> list[float]:
    """By turn, the speed of whatever is the fastest in the other half of the turns: the odd ones
    for an even turn, and the other way round.

    Args:
        speeds: of everything that is compared, by turn.
    """
    halves = [max(speeds, key=lambda each: median(each[half::2])) for half in (1, 0)]
    return [halves[turn % 2][turn] for turn in range(len(speeds[0]))]


def count_processor_time() -> None:
    """Lets all that measures seconds in this process count the time that it had a processor."""
    time.perf_counter = time.process_time


def cells(options: argparse.Namespace) -> Iterable[tuple[float, str, int]]:
    """All combinations of temperature, text and batch size."""
    return itertools.product(options.temperatures, options.texts, options.batches)


def pays(row: dict[str, Any]) -> bool:
    """Whether speculation pays in a cell."""
    return Ratio(*row["best_over_plain"]).low > 1


def verdicts(ratios: Sequence[Ratio], bar: float) -> str:
    """How many ratios meet the bar, and in how many the interval leaves no doubt that they miss."""
    met = sum(each.median >= bar for each in ratios)
    clear = sum(each.high < bar for each in ratios)
    least = f"{min(each.median for each in ratios):.3f}" if ratios else "-"
    return (
        f"{met} of {len(ratios)} cells at {bar} or more, {clear} clearly below; the lowest {least}"
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, rows = report["about"], report["cells"]
    over_plain = [Ratio(*row["over_plain"]) for row in rows.values()]
    over_best = [Ratio(*row["over_best"]) for row in rows.values() if pays(row)]
    lines = page.header(
        "The governor beside plain decoding and fixed draft lengths",
        about,
        f"outputs of {about['tokens']} tokens, generated side by side; medians of ratios in the "
        f"same turn, with bootstrap intervals of 90 %.",
    )
    if about.get("clock") == "processor":
        lines += ["", "Seconds are those in which the process had a processor."]
    lines += ["", f"- Over plain decoding: {verdicts(over_plain, OVER_PLAIN)}."]
    lines += [
        f"- Over the best fixed length, where speculation pays: {verdicts(over_best, OVER_BEST)}. "
        f"In each turn it is the length that is the best in the other half of the turns."
    ]
    if steps := report.get("steps"):
        lines += [f"- {line}" for line in summary(steps)]
    heads = ("draft", "temperature", "text", "batch", "turns", "plain, tok/s", "governor")
    ratios = ("over plain", "90 %", "best fixed length", "over best", "90 %")
    lines += page.table((*heads, *ratios), (_line(key, row) for key, row in rows.items()), left=3)
    return "\n".join(lines) + "\n"


def _line(key: str, row: dict[str, Any]) -> tuple[str, ...]:
    speeds, plain, best = row["speeds"], Ratio(*row["over_plain"]), Ratio(*row["over_best"])
    return (
        *key.split(", "),
        str(len(speeds[PLAIN])),
        f"{median(speeds[PLAIN]):.0f}",
        f"{median(speeds[GOVERNED]):.0f}",
        _marked(plain, OVER_PLAIN),
        f"{plain.low:.3f} to {plain.high:.3f}",
        row["best"],
        _marked(best, OVER_BEST) if pays(row) else "-",
        f"{best.low:.3f} to {best.high:.3f}" if pays(row) else "-",
    )


def _marked(ratio: Ratio, bar: float) -> str:
    text = f"{ratio.median:.3f}"
    return f"**{text}**" if ratio.median < bar else text


def draw(report: dict[str, Any], heat_map: Path) -> None:
    """Draws the ratios over plain decoding, and over the best fixed length where speculation
    pays. Numbers below the bar are bold."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = report["cells"]
    batches = sorted({int(key.rsplit(", ", 1)[1]) for key in rows})
    kinds = list(dict.fromkeys(key.rsplit(", ", 1)[0] for key in rows))
    with mpl.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9.0, 1.4 + 0.24 * len(kinds)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, name, bar in zip(panels, _SHOWN, (OVER_PLAIN, OVER_BEST), strict=True):
            ratios = [[_shown(rows.get(f"{k}, {b}"), name) for b in batches] for k in kinds]
            image = axes.imshow(ratios, cmap="RdBu", vmin=0.7, vmax=1.3, aspect="auto")
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_yticks(range(len(kinds)), kinds)
            axes.set_xlabel("batch size")
            axes.set_title(f"governor {name.replace('_', ' ')}, bar {bar}")
            for y, line in enumerate(ratios):
                for x, ratio in enumerate(line):
                    if ratio == ratio:
                        weight = "bold" if ratio < bar else "normal"
                        at = {"ha": "center", "va": "center", "fontsize": 7, "fontweight": weight}
                        at["color"] = "white" if abs(ratio - 1) > _DARK else "black"
                        axes.text(x, y, f"{ratio:.2f}", **at)
        figure.colorbar(image, ax=panels, extend="both", shrink=0.5)
        figure.savefig(heat_map, metadata={"Date": None, "Creator": "benchmarks.governor"})


def _shown(row: dict[str, Any] | None, name: str) -> float:
    """A cell's ratio; NaN where there is none."""
    if row is None or (name == "over_best" and not pays(row)):
        return float("nan")
    return float(row[name][0])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures what is missing, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--compile", choices=["off", "auto"], default="auto")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per row")
    parser.add_argument("--seconds", type=float, default=9.0, help="for each cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to stop for now")
    parser.add_argument("--step-rounds", type=int, default=60)
    parser.add_argument("--step-repeats", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=TEXTS)
    parser.add_argument("--drafts", choices=list(NOISE), nargs="+", default=list(NOISE))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    parser.add_argument("--name", default="governor", help="name of the report")
    parser.add_argument("--quick", action="store_true", help="one small cell, to see it work")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.seconds, options.step_rounds, options.step_repeats = 8, 0.0, 6, 1
        options.temperatures, options.texts, options.drafts = [0.0], ["code"], ["good"]
        options.batches, options.lengths = [2], [2]
    if options.clock == "processor":
        count_processor_time()
    file, ends = options.out / f"{options.name}.json", time.monotonic() + 60 * options.minutes
    report: dict[str, Any] = {"cells": {}}
    if file.exists():
        report = json.loads(file.read_text(encoding="utf-8"))
    report["about"] = page.about(
        command_line(), seconds=options.seconds, tokens=options.tokens, clock=options.clock
    )
    source = options.draft or assets.draft_path()
    is_head = format_of(source) is not None
    for draft in options.drafts:
        engines: dict[str, Engine] | None = None
        for temperature, text, batch in cells(options):
            key = f"{draft}, {temperature:g}, {text}, {batch}"
            if key in report["cells"]:
                continue
            if time.monotonic() > ends:
                return
            if engines is None and is_head:
                engines = engines_of(options, source, NOISE[draft])
            elif engines is None:
                with TemporaryDirectory() as folder:
                    own = noisy_draft(source, NOISE[draft], options.dtype, Path(folder))
                    engines = engines_of(options, own)
            prompts = prompts_of(text, batch, engines[GOVERNED].target.num_tokens)
            sampling = Sampling(
                temperature=temperature, max_new_tokens=options.tokens, ignore_eos=True
            )
            report["cells"][key] = measure(engines, prompts, sampling, options.seconds)
            page.write(options.out, options.name, report, markdown(report))
            print(key, report["cells"][key]["over_plain"], flush=True)
    if "steps" not in report:
        report["steps"] = steps(engines_of(options, source)[GOVERNED], options)
    page.publish(options.out, options.name, report, markdown(report))
    draw(report, file.with_suffix(".svg"))
    draw_steps(report["steps"], options.out / f"{options.name}_steps.svg")


if __name__ == "__main__":
    main()
