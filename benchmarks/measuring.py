"""What measuring costs, and how well two runs of one benchmark agree.

    python -m benchmarks.measuring [--threads 1] [--repeats 4] [--max-repeats 24] [--out DIR]

The same plan of ``outrider bench`` runs twice, one run after the other, on the embedded pair,
compiled, whose rounds are the shortest that a benchmark here has. Each run widens itself: cells
that another run may find more than 5 % apart are repeated, with their baseline, up to
``--max-repeats``. The share of measuring is the time to read the clock and to note the end of a
round, measured by the run itself, times the notes of a cell, over the cell's time.

An interrupted run goes on where it stopped, from the journals in ``runs/benchmarks``. Writes JSON
and Markdown.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.run_plan import report_progress, slim
from outrider.lab.bench import BenchPlan, CellResult, plan_of, run_bench
from outrider.lab.bench.measuring_share import MOST
from outrider.lab.bench.ratio import STEADY

METHODS = ("speculative:gamma=3", "speculative:gamma=5", "prompt-lookup", "suffix")
RUNS = ("first", "second")


def plan(options: argparse.Namespace) -> BenchPlan:
    """Short outputs of code and of prose, greedy."""
    return plan_of(
        {
            "methods": METHODS,
            "data": [{"source": f"builtin:{name}", "limit": 4} for name in ("code", "prose")],
            "repeats": options.repeats,
            "max_repeats": options.max_repeats,
            "max_new_tokens": 48,
            "ignore_eos": True,
            "compile": "auto",
            "threads": options.threads,
        }
    )


def markdown(about: dict[str, Any], runs: Sequence[Sequence[CellResult]]) -> str:
    """The results of both runs as a page."""
    pairs = [(a, b) for a, b in zip(*runs, strict=True) if a.speedup and b.speedup]
    heads = "method|prompts|first run|second run|larger to smaller|repeats|share of measuring"
    settings = (
        f"{about['dtype']}, embedded pair, compiled, temperature 0. Two runs of one plan, at least "
        f"{about['plan']['repeats']} and at most {about['plan']['max_repeats']} repeats of each "
        f"cell. ~: another run may differ by more than 5 % even so. {about['note']}"
    )
    title = "What measuring costs, and how well two runs agree"
    lines = page.header(title, about, settings.rstrip())
    lines += page.table(heads.split("|"), map(_row, pairs), left=2)
    shares = [each.speed["measuring_share"] for run in runs for each in run]
    distances = [_distance(a, b) for a, b in pairs if _steady(a) and _steady(b)]
    bars = [
        (
            f"share of measuring at most {100 * MOST:g} %",
            _percent(max(shares)),
            max(shares) <= MOST,
        ),
        (
            f"steady speed-ups of two runs within {100 * STEADY:g} % of each other",
            f"{sum(each <= 1 + STEADY for each in distances)} of {len(distances)}",
            bool(distances) and all(each <= 1 + STEADY for each in distances),
        ),
    ]
    return "\n".join(lines + page.bars_table(bars)) + "\n"


def _row(pair: tuple[CellResult, CellResult]) -> tuple[str, ...]:
    first, second = pair
    share = max(each.speed["measuring_share"] for each in pair)
    return (
        first.cell.title,
        first.cell.data,
        *(_written(each) for each in pair),
        f"{_distance(first, second):.3f}",
        " and ".join(str(len(each.repeats)) for each in pair),
        _percent(share),
    )


def _written(result: CellResult) -> str:
    assert result.speedup is not None
    return f"{'' if _steady(result) else '~'}{result.speedup['ratio']:.2f}×"


def _percent(share: float) -> str:
    return f"{100 * share:.4f} %"


def _distance(a: CellResult, b: CellResult) -> float:
    assert a.speedup is not None
    assert b.speedup is not None
    ratio: float = a.speedup["ratio"] / b.speedup["ratio"]
    return max(ratio, 1 / ratio)


def _steady(result: CellResult) -> bool:
    assert result.speedup is not None
    return bool(result.speedup["steady"])


def main() -> None:
    """Parses the options, measures twice, writes the results and prints the page."""
    parser = page.parser(__doc__, threads=1)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--max-repeats", type=int, default=24)
    parser.add_argument("--journal", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    options = parser.parse_args()
    wanted = plan(options)
    folders = [options.journal / f"measuring_{name}" for name in RUNS]
    runs = [run_bench(wanted, report_progress, folder=folder) for folder in folders]
    about = {
        **runs[0][0].environment,
        "command": f"python -m benchmarks.measuring --threads {options.threads} "
        f"--repeats {options.repeats} --max-repeats {options.max_repeats}",
        "note": options.note,
    }
    cells = {name: list(map(slim, run)) for name, run in zip(RUNS, runs, strict=True)}
    page.publish(options.out, "measuring", {"about": about, **cells}, markdown(about, runs))


if __name__ == "__main__":
    main()
