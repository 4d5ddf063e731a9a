"""Time per round of two checkouts of this project, measured side by side.

    git worktree add ../before COMMIT
    python -m benchmarks.round_times --before ../before [--compile auto] [--dtype bfloat16]
        [--methods mjsd mtad] [--inflated]

Each checkout runs in a process of its own, and the two take turns: one generation in the one, the
same generation in the other, in alternating order. Reported are the median time per round of each
checkout, and of the ratio after / before the median over the pairs and its quartiles. Both
checkouts share the Python environment, and have the embedded pair's weights as they are there. With
one thread, times are those that the processor spent on the process, which other load changes
little; with more they are wall-clock times. They include a request's share of everything that
happens once per generation, such as its prefill.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import page, round_times_worker
from benchmarks.round_times_worker import METHODS, NUM_INFLATED_TOKENS, NUM_TOKENS
from outrider.lab.metadata import run_metadata

WORKER = Path(round_times_worker.__file__).resolve()
_SETTINGS = "compile", "dtype", "threads", "repeats", "inflated"


class Checkout:
    """A process that generates with the code of one checkout."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, "-P", str(WORKER), "--compile", options.compile]
        command += ["--methods", *options.methods]
        command += ["--dtype", options.dtype, "--threads", str(options.threads)]
        command += ["--inflated"] * options.inflated
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases: list[str] = json.loads(self._line())

    def round_time(self, case: str) -> float:
        """Microseconds per round of one generation."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a checkout's process has ended; its error is above")
        return line


def compare(before: Checkout, after: Checkout, case: str, repeats: int) -> dict[str, Any]:
    """The times of both checkouts, which take turns."""
    times: dict[str, list[float]] = {"before": [], "after": []}
    sides = [("before", before), ("after", after)]
    for repeat in range(repeats):
        for name, checkout in sides[:: 1 if repeat % 2 else -1]:
            times[name].append(checkout.round_time(case))
    ratios = [b / a for a, b in zip(times["before"], times["after"], strict=True)]
    return {"case": case, **times, "ratios": ratios}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    where = report["about"] | {"threads": report["threads"], "command": report["command"]}
    pair, num_tokens = "embedded pair", NUM_TOKENS
    if report["inflated"]:
        pair = "embedded draft, target inflated to 0.9 billion parameters (`benchmarks/inflate.py`)"
        num_tokens = NUM_INFLATED_TOKENS
    settings = (
        f'{pair}, in {report["dtype"]}, `compile="{report["compile"]}"`; {num_tokens} tokens '
        f"per generation, {report['repeats']} pairs of generations. Before: {report['before']}; "
        f"after: {report['after']}. Load average before: {report['load']:.1f}."
    )
    if report["threads"] == 1:
        settings += " Times are those that the processor spent on the process."
    lines = page.header("Time per round, before and after", where, settings)
    heads = ("case", "before, µs", "after, µs", "after / before (quartiles)")
    lines += page.table(heads, map(_cells, report["rows"]))
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, middle, high = quantiles(row["ratios"], n=4)
    return (
        row["case"],
        f"{median(row['before']):.0f}",
        f"{median(row['after']):.0f}",
        f"{middle:.3f} ({low:.3f} to {high:.3f})",
    )


def commit_of(folder: Path) -> str:
    """The commit that a checkout is at; the folder's name where git knows none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or folder.name


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--compile", choices=["off", "auto"], default="off")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="of both checkouts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--inflated", action="store_true", help="the target at the cost of 0.9 billion parameters"
    )
    parser.add_argument("--repeats", type=int, default=15, help="pairs of generations per case")
    options = parser.parse_args(arguments)
    if options.before is None or not (options.before / "outrider").is_dir():
        parser.error(f"--before {options.before}: must be the folder of another checkout")
    here = Path(__file__).resolve().parents[1]
    load = os.getloadavg()[0]
    commits = commit_of(options.before), commit_of(here)
    before, after = (Checkout(each.resolve(), options) for each in (options.before, here))
    rows = [compare(before, after, case, options.repeats) for case in after.cases]
    for checkout in (before, after):
        checkout.close()
    report = {
        "about": run_metadata(repeats=options.repeats),
        "command": f"python -m benchmarks.round_times --before BEFORE --compile {options.compile} "
        f"--dtype {options.dtype} --threads {options.threads} --repeats {options.repeats} "
        f"--methods {' '.join(options.methods)}" + " --inflated" * options.inflated,
        "load": load,
        "before": commits[0],
        "after": commits[1],
        "rows": rows,
        **{
            key: getattr(options, key)
            for key in ("compile", "dtype", "threads", "repeats", "inflated")
        },
    }
    name = f"round_times_{options.compile}_{options.dtype}" + "_inflated" * options.inflated
    page.publish(options.out, name, report, markdown(report))


if __name__ == "__main__":
    main()
