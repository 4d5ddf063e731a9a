"""Measures acceptance lengths alone, in batches: quickly, and whatever the machine is doing.

    python -m benchmarks.acceptance --draft embedded:smollm2-eagle3 --draft runs/head/best \\
        --method eagle3:gamma=4 --method eagle3-tree-hybrid [--batch 16] [--limit 20] [--out DIR]

Each method runs with each draft that fits it, at each temperature, on each of the tasks' files that
``benchmarks.published_prompts`` writes, or on those of ``--data``. The acceptance length of a task
is the tokens of all its outputs over the target's forward passes that emitted them; tasks count
alike in the mean. Intervals are of a bootstrap over prompts, drawn within each task. No speed is
measured and plain decoding does not run, so other work on the machine changes nothing, and batches
only save time. An interrupted run goes on where it stopped, from the journal in
``runs/benchmarks``. Writes JSON and Markdown.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import page
from outrider.engine import Stats
from outrider.lab.bench import BenchPlan, CellResult, Progress, plan_of, run_bench
from outrider.lab.bench.engines import Given
from outrider.lab.data import DataSet
from outrider.lab.metadata import command_line

PROMPTS = Path("runs/smollm2/prompts")
TASKS = ("mt_bench", "gsm8k", "summarization", "humaneval")
METHODS = ("eagle3:gamma=4", "eagle3-hybrid", "eagle3-tree-hybrid")
BARS = {0.0: 2.6, 1.0: 2.2}
"""The least mean acceptance length of the best method by temperature."""
DRAWS, CONFIDENCE = 2000, 0.95
DEPTHS = 6


@dataclass(frozen=True)
class Length:
    """An acceptance length with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """A method with its draft at one temperature, on all tasks.

    Attributes:
        method, draft: their names.
        temperature: of the sampling.
        outputs: by task, the counts of each output.
        failure: why a task could not be measured; empty if all were.
    """

    method: str
    draft: str
    temperature: float
    outputs: Mapping[str, Sequence[Stats]]
    failure: str

    def lengths(self) -> dict[str, Length]:
        """By task, and in the mean over tasks."""
        generator = np.random.default_rng(0)
        drawn = {}
        for task, outputs in self.outputs.items():
            emitted_N, rounds_N = _counts(outputs)
            share = np.full(len(outputs), 1 / len(outputs))
            times_SN = generator.multinomial(len(outputs), share, DRAWS)
            drawn[task] = (times_SN @ emitted_N) / (times_SN @ rounds_N)
        found = {
            task: _length(Stats.total(outputs).acceptance_length, drawn[task])
            for task, outputs in self.outputs.items()
        }
        mean = float(np.mean([each.value for each in found.values()]))
        return found | {"mean": _length(mean, np.mean([*drawn.values()], axis=0))}

    def total(self) -> Stats:
        """The counts of all outputs of all tasks."""
        return Stats.total(one for outputs in self.outputs.values() for one in outputs)

    def as_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        about = {"method": self.method, "draft": self.draft, "temperature": self.temperature}
        if self.failure:
            return about | {"failure": self.failure}
        total = self.total()
        return about | {
            "lengths": {task: vars(length) for task, length in self.lengths().items()},
            "alpha": total.alpha,
            "acceptance_rate": total.acceptance_rate,
            "acceptance_by_position": total.acceptance_by_position,
            "outputs": {
                task: [{"emitted": one.emitted, "rounds": one.rounds} for one in outputs]
                for task, outputs in self.outputs.items()
            },
        }


def _counts(outputs: Sequence[Stats]) -> tuple[Any, Any]:
    """Tokens and forward passes of each output."""
    return np.array([one.emitted for one in outputs]), np.array([one.rounds for one in outputs])


def _length(value: float, drawn: Any) -> Length:
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [edge, 1 - edge])
    return Length(value, float(low), float(high))


def plan_for(options: argparse.Namespace) -> BenchPlan:
    """The plan: methods with each of their drafts by name, and the first of them as the baseline,
    since plain decoding emits one token per forward pass."""
    data = options.data or [PROMPTS / f"{task}.jsonl" for task in TASKS]
    plan = plan_of(
        {
            "target": options.target,
            "drafts": options.draft or ["embedded:smollm2-eagle3"],
            "methods": options.method or METHODS,
            "temperatures": options.temperature,
            "data": [{"source": str(each), "limit": options.limit} for each in data],
            "batch_sizes": [options.batch],
            "max_new_tokens": options.tokens,
            "repeats": 1,
            "max_repeats": 1,
            "warmup": 0,
            "seed": options.seed,
            "dtype": options.dtype,
            "device": options.device,
            "compile": options.compile,
            "threads": options.threads,
        }
    )
    methods = tuple(
        replace(spec, draft=draft, label=spec.title)
        for spec in plan.methods
        for draft in plan.drafts_of(spec)
    )
    return replace(plan, methods=methods, drafts=(), baseline=methods[0])


def rows_of(results: Sequence[CellResult]) -> list[Row]:
    """The rows, in the order of temperatures, methods and drafts."""
    groups: dict[tuple[float, str, str], list[CellResult]] = {}
    for each in results:
        cell = each.cell
        groups.setdefault((cell.temperature, cell.title, cell.draft or ""), []).append(each)
    return [
        Row(
            method,
            draft,
            temperature,
            {
                each.cell.data: [one.total() for repeat in each.repeats for one in repeat.requests]
                for each in group
            },
            next((each.error for each in group if each.error), ""),
        )
        for (temperature, method, draft), group in groups.items()
    ]


def bars(rows: Sequence[Row]) -> Iterator[page.Bar]:
    """The mean acceptance length of the best method, where a temperature has a bar."""
    for temperature, least in BARS.items():
        there = [each for each in rows if each.temperature == temperature and not each.failure]
        if there:
            best = max(there, key=lambda row: row.lengths()["mean"].value)
            value = best.lengths()["mean"]
            text = f"temperature {temperature:g}: {least} by the best, {best.method} {best.draft}"
            yield text.rstrip(), str(value), value.value >= least


def markdown(results: Sequence[CellResult]) -> str:
    """The results as a page."""
    about, rows = results[0].environment, rows_of(results)
    plan = about["plan"]
    sizes = {each.data["name"]: each.data["examples"] for each in results}
    settings = (
        f"commit {about['commit']}; target {plan['target']}, {about['dtype']}, batches of "
        f"{results[0].cell.batch_size}, at most {plan['max_new_tokens']} tokens each. Prompts: "
        f"{', '.join(f'{name}: {size}' for name, size in sizes.items())}."
    )
    lines = page.header("Acceptance lengths", about, settings)
    lines += [
        "",
        "Tokens per forward pass of the target, with 95 % intervals over prompts; α by position is "
        "the share of tokens accepted at each depth of a draft, of those verified there.",
    ]
    heads = ("method", "draft", *sizes, "mean", "α by position")
    for temperature in dict.fromkeys(each.temperature for each in rows):
        there = [each for each in rows if each.temperature == temperature]
        lines += ["", f"## Temperature {temperature:g}"]
        lines += page.table(heads, (_line(each, list(sizes)) for each in there), left=2)
    return "\n".join([*lines, *page.bars_table(bars(rows))]) + "\n"


def _line(row: Row, tasks: Sequence[str]) -> list[str]:
    if row.failure:
        return [row.method, row.draft, *["–"] * len(tasks), "–", f"failed: {row.failure}"]
    lengths = row.lengths()
    shares = row.total().acceptance_by_position[:DEPTHS]
    by_position = " ".join(f"{share:.2f}" for share in shares)
    return [row.method, row.draft, *(str(lengths[each]) for each in [*tasks, "mean"]), by_position]


def measure(
    options: argparse.Namespace,
    *,
    models: Mapping[str, Given] | None = None,
    data: Mapping[str, DataSet] | None = None,
) -> list[CellResult]:
    """Measures what the journal does not have.

    Args:
        options: the command line.
        models, data: those in memory, by the names that the command line uses.
    """
    return run_bench(plan_for(options), _report, folder=options.journal, models=models, data=data)


def _report(progress: Progress) -> None:
    print(f"{progress.done}/{progress.total} {progress.stage}", file=sys.stderr)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = page.parser(__doc__)
    parser.add_argument("--target", default="runs/smollm2/model", help="folder or hub id")
    parser.add_argument("--draft", action="append", help="draft model or head; several times")
    parser.add_argument("--method", action="append", help="such as eagle3:gamma=4; several times")
    parser.add_argument("--data", type=Path, nargs="+", help=f"default: the tasks in {PROMPTS}")
    parser.add_argument("--limit", type=int, help="prompts per task; default: all")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128, help="of each output at most")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", default="off", choices=["off", "auto", "max"])
    parser.add_argument("--journal", type=Path, default=Path("runs/benchmarks/acceptance"))
    parser.add_argument("--name", default="acceptance", help="of the result's files")
    return parser.parse_args(argv)


def main() -> None:
    """Parses the options, measures, writes the results and prints the page."""
    options = arguments()
    results = measure(options)
    about = {**results[0].environment, "command": command_line()}
    report = {"about": about, "rows": [row.as_dict() for row in rows_of(results)]}
    page.publish(options.out, options.name, report, markdown(results))


if __name__ == "__main__":
    main()
