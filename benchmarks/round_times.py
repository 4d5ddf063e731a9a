"""Time per round of two checkouts of this project, measured side by side.

    git worktree add ../before COMMIT
    python -m benchmarks.round_times --before ../before [--compile auto] [--dtype bfloat16]

Each checkout runs in a process of its own, and the two take turns: one generation in the one, the
same generation in the other, in alternating order. Reported are the median time per round of each
checkout, and of the ratio after / before the median over the pairs and its quartiles. Both
checkouts share the Python environment, and have the embedded pair's weights as they are there.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PROMPT = 'def fibonacci(n):\n    """Return the n-th number."""\n'
METHODS = ("plain", "speculative", "prompt-lookup")
TEMPERATURES = (0.0, 0.8)
NUM_TOKENS = 96


class Checkout:
    """A process that generates with the code of one checkout."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", str(folder)]
        command += ["--compile", options.compile, "--dtype", options.dtype]
        self._process = subprocess.Popen(
            [*command, "--threads", str(options.threads)],
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


def work(compile: str, dtype: str, threads: int) -> None:
    """Generates what the lines of standard input name; prints the time per round of each."""
    warnings.simplefilter("ignore")
    import torch

    import outrider

    torch.set_num_threads(threads)
    cases: dict[str, tuple[Any, Any, Any]] = {}
    for method in METHODS:
        engine = outrider.load(method=method, compile=compile, dtype=dtype)
        for t in TEMPERATURES:
            sampling = outrider.Sampling(
                temperature=t, max_new_tokens=NUM_TOKENS, seed=1, ignore_eos=True
            )
            cases[f"{method}, temperature {t:g}"] = engine, PROMPT, sampling
        prompts = [PROMPT * (1 + i % 3) for i in range(8)]
        cases[f"{method}, temperature 0.8, batch of 8"] = engine, prompts, sampling
    for engine, prompt, sampling in cases.values():
        engine.generate(prompt, sampling)
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        engine, prompt, sampling = cases[line.strip()]
        began = time.perf_counter()
        found = engine.generate(prompt, sampling)
        seconds = time.perf_counter() - began
        many = isinstance(prompt, list)
        rounds = max(each.stats.rounds for each in found) if many else found.stats.rounds
        print(1e6 * seconds / rounds, flush=True)


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
    about = report["about"]
    lines = [
        "# Time per round, before and after",
        "",
        f"{about['date']}, {about['hardware']}, {report['threads']} threads, torch "
        f"{about['versions']['torch']}; embedded pair in {report['dtype']}, `compile="
        f'"{report["compile"]}"`; {NUM_TOKENS} tokens per generation, {report["repeats"]} pairs of '
        f"generations. Before: {report['before']}; after: {report['after']}. Load average before: "
        f"{report['load']:.1f}.",
        "",
        f"Command: `{report['command']}`",
        "",
        "| case | before, µs | after, µs | after / before (quartiles) |",
        "|---|---:|---:|---:|",
    ]
    for row in report["rows"]:
        low, middle, high = quantiles(row["ratios"], n=4)
        lines.append(
            f"| {row['case']} | {median(row['before']):.0f} | {median(row['after']):.0f} | "
            f"{middle:.3f} ({low:.3f} to {high:.3f}) |"
        )
    return "\n".join(lines) + "\n"


def commit_of(folder: Path) -> str:
    """The commit that a checkout is at; the folder's name where git knows none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or folder.name


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the other checkout")
    parser.add_argument("--compile", choices=["off", "auto"], default="off")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15, help="pairs of generations per case")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work:
        work(options.compile, options.dtype, options.threads)
        return
    if options.before is None or not (options.before / "outrider").is_dir():
        parser.error(f"--before {options.before}: must be the folder of another checkout")
    from outrider.lab.metadata import run_metadata  # an older checkout may have no such module

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
        f"--dtype {options.dtype} --threads {options.threads} --repeats {options.repeats}",
        "load": load,
        "before": commits[0],
        "after": commits[1],
        "rows": rows,
        **{key: getattr(options, key) for key in ("compile", "dtype", "threads", "repeats")},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"round_times_{options.compile}_{options.dtype}.json"
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
