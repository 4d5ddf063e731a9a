"""What the governor costs: microseconds of a choice, and of taking a round's outcome.

    python -m benchmarks.governor_cost [--choices 10000]

No model runs. The rounds' times and acceptances are drawn at random around fixed means, so that
beliefs move as they do in use. The bar is 1 % of a round. Run it on an idle machine.
"""

import random
import time
from collections.abc import Sequence
from statistics import mean, quantiles
from typing import Any

from benchmarks import page
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.sources import MOST, Sources
from outrider.lab.metadata import command_line

BATCHES = (1, 4, 16, 32)
ACCEPTANCES = (0.8, 0.1)
_WARM_UP = 200  # rounds
_NOISE = 0.03  # relative standard deviation of times


def measure(rows: int, acceptance: float, choices: int, seed: int = 0) -> dict[str, float]:
    """Microseconds per round of a batch.

    Args:
        rows: of the batch.
        acceptance: probability that a drafted token is accepted after accepted ones.
        choices: rounds.
        seed: of times and acceptances.
    """
    drawn = random.Random(seed)
    batch = BatchGovernor(Governor(Sources()))
    memories, limits = [RowMemory(True) for _ in range(rows)], [MOST] * rows
    asks, learns = [], []
    for number in range(choices + _WARM_UP):
        began = time.perf_counter()
        asked = batch.ask(memories, limits, True)
        chosen = time.perf_counter()
        accepted = [_accepted(drawn, acceptance, length) for length in asked.lengths]
        draft = 0.1 * asked.length * drawn.gauss(1, _NOISE)
        total = draft + (1 + 0.003 * rows * (asked.length + 1)) * drawn.gauss(1, _NOISE)
        ready = time.perf_counter()
        batch.learn(asked, memories, accepted, True, draft, total)
        if number >= _WARM_UP:
            asks.append(chosen - began)
            learns.append(time.perf_counter() - ready)
    both = [ask + learn for ask, learn in zip(asks, learns, strict=True)]
    return {
        "choice": 1e6 * mean(asks),
        "outcome": 1e6 * mean(learns),
        "both": 1e6 * mean(both),
        "99th percentile": 1e6 * quantiles(both, n=100)[-1],
    }


def _accepted(drawn: random.Random, acceptance: float, length: int) -> int:
    return next((k for k in range(length) if drawn.random() >= acceptance), length)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    names = ("choice", "outcome", "both", "99th percentile")
    rows = (
        (row["batch"], f"{row['acceptance']:g}", *(f"{row[name]:.0f}" for name in names))
        for row in report["cells"]
    )
    lines = page.header("The cost of the governor per round", report["about"], "microseconds.")
    lines += page.table(("batch", "acceptance", *names), rows, left=0)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--choices", type=int, default=10_000)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    options = parser.parse_args(arguments)
    cells = [
        {"batch": rows, "acceptance": acceptance} | measure(rows, acceptance, options.choices)
        for rows in options.batches
        for acceptance in options.acceptances
    ]
    report = {"about": page.about(command_line(), choices=options.choices), "cells": cells}
    page.publish(options.out, "governor_cost", report, markdown(report))


if __name__ == "__main__":
    main()
