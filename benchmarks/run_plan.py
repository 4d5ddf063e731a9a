"""Runs one of the plans in ``benchmarks/plans`` and writes its page.

    python -m benchmarks.run_plan hybrid [--repeats 3] [--limit 3] [--tokens 64] [--out DIR]

A plan is a plan of ``outrider bench`` with two more tables: ``[page]``, the page's title and text,
and perhaps the ``numbers`` that have a table of their own, such as ``α`` or ``perplexity macro``;
and ``[[bars]]``, each with a ``method``, the methods that it is compared with (``best_of``), the
least share of their best number (``at_least``) or the largest (``at_most``, where less is better),
perhaps the ``number``, by default the speed, and perhaps the data sets. Data sets ``stdlib:KIND``
are the prompts of ``benchmarks.copy_prompts``. An interrupted run goes on where it stopped, from
the journal in ``runs/benchmarks``. Writes JSON and Markdown.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.copy_prompts import KINDS, prompts
from benchmarks.page import bars_table, header, publish
from outrider.lab.bench import BenchPlan, CellResult, Progress, plan_of, read_plan, run_bench
from outrider.lab.cell_view import CellView, views_of
from outrider.lab.data import DataSet, Example
from outrider.lab.data.hub import hash_of
from outrider.lab.report.markdown import LEGEND, SPEED, number_of, setting_tables

PLANS = Path(__file__).parent / "plans"
MOST = 1000  # prompts of a kind, from which a plan takes some


def stdlib(kind: Any) -> DataSet:
    """The prompts of a kind from the held-out files of the standard library."""
    found = prompts(kind, MOST)
    examples = tuple(
        Example(prompt.text, prompt.reference or None, id=str(number))
        for number, prompt in enumerate(found)
    )
    records: list[Any] = [vars(prompt) for prompt in found]
    return DataSet(kind, examples, hash_of(records), f"stdlib:{kind}", "prompts")


def page(description: Mapping[str, Any], results: Sequence[CellResult]) -> str:
    """The results as a page: a table per temperature and batch size, the data sets side by side."""
    about = results[0].environment
    plan = about["plan"]
    sizes = {each.data["name"]: each.data["examples"] for each in results}
    numbers = ", ".join(f"{name}: {size}" for name, size in sizes.items())
    settings = (
        f"commit {about['commit']}; target {plan['target']}, {about['dtype']}, compile "
        f"{plan['compile']}, at most {plan['max_new_tokens']} tokens each, at least "
        f"{plan['repeats']} interleaved repeats. Prompts: {numbers}."
    )
    where = {**about, "command": description["command"]}
    lines = header(description["page"]["title"], where, settings)
    lines += ["", description["page"]["text"].strip(), "", LEGEND]
    views = views_of(results)
    lines += setting_tables(views, description["page"].get("numbers", ()))
    found = bars(description.get("bars", ()), views)
    if found:
        lines += bars_table((text, f"{value:.2f}", met) for text, value, met in found)
    return "\n".join(lines) + "\n"


def bars(
    wanted: Sequence[Mapping[str, Any]], cells: Sequence[CellView]
) -> list[tuple[str, float, bool]]:
    """Each bar at each setting, with the measured share and whether it is met; a method that failed
    or lacks the number misses its bars."""
    found = []
    for bar in wanted:
        number = bar.get("number", SPEED)
        for setting in dict.fromkeys(each.setting for each in cells):
            data, temperature, batch_size = setting
            if data not in bar.get("data", [data]):
                continue
            values = {
                each.title: number_of(each, number) for each in cells if each.setting == setting
            }
            share, met = _share(bar, values)
            where = f"temperature {temperature:g}, {data}, batch {batch_size}"
            what = "" if number == SPEED else f", {number}"
            relation = "" if "at_least" in bar else "at most "
            limit = bar.get("at_least", bar.get("at_most"))
            text = f"{bar['method']}, {where}{what}: {relation}{limit:g} of {_best(bar['best_of'])}"
            found.append((text, share, met))
    return found


def _share(bar: Mapping[str, Any], values: Mapping[str, float | None]) -> tuple[float, bool]:
    """The method's number over the best of the others', and whether it meets the bar."""
    mine, others = values[bar["method"]], [values[name] for name in bar["best_of"]]
    known = [each for each in others if each]
    if "at_least" in bar:
        share = (mine or 0.0) / max(known) if known else math.inf
        return share, share >= bar["at_least"]
    share = math.inf if mine is None or not known else mine / min(known)
    return share, share <= bar["at_most"]


def _best(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"the best of {'; '.join(names)}"


def slim(result: CellResult) -> dict[str, Any]:
    """A result as JSON, without the measurements of single requests and without outputs."""
    document = result.as_dict()
    return {
        name: document[name] for name in ("cell", "data", "speed", "speedup", "metrics", "error")
    }


def planned(name: str, options: argparse.Namespace) -> tuple[BenchPlan, dict[str, Any]]:
    """The plan of that name, with the command line's values in place of its own; and its page."""
    values = read_plan(PLANS / f"{name}.toml")
    description: dict[str, Any] = {
        key: values.pop(key) for key in ("page", "bars") if key in values
    }
    given = {"repeats": options.repeats, "max_new_tokens": options.tokens}
    values |= {key: value for key, value in given.items() if value is not None}
    plan = plan_of(values)
    if options.limit is not None:
        plan = replace(plan, data=tuple(replace(each, limit=options.limit) for each in plan.data))
    return plan, description


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(path.stem for path in PLANS.glob("*.toml")))
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--limit", type=int, help="prompts per data set")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--journal", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(argv)


def main() -> None:
    """Parses the options, measures, writes the results and prints the page."""
    options = arguments()
    plan, description = planned(options.name, options)
    description["command"] = " ".join(["python -m benchmarks.run_plan", *sys.argv[1:]])
    wanted = {spec.source for spec in plan.data}
    data = {f"stdlib:{kind}": stdlib(kind) for kind in KINDS if f"stdlib:{kind}" in wanted}
    results = run_bench(plan, report_progress, folder=options.journal / options.name, data=data)
    document = {"about": results[0].environment, "cells": [slim(result) for result in results]}
    publish(options.out, options.name, document, page(description, results))


def report_progress(progress: Progress) -> None:
    """Prints a line per repeat."""
    print(f"{progress.done}/{progress.total} {progress.stage}", file=sys.stderr)


if __name__ == "__main__":
    main()
