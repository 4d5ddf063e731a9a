"""Duration of the first use: compiling kernels and programs of the embedded pair.

    python -m benchmarks.first_use [--dtypes float32 bfloat16] [--method speculative]

Each precision is loaded with ``compile="auto"`` in its own process with empty cache folders, and
then a second time with the filled caches. For each program, measures the wall clock and the
processor time (Python, and the C++ compilers that it runs). Writes JSON and Markdown.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.lab.metadata import run_metadata

KERNELS = "kernels, and loading the models"


def now() -> list[float]:
    """The wall clock, and the processor time of this process and of its finished children."""
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return [
        time.perf_counter(),
        own.ru_utime + own.ru_stime,
        others.ru_utime + others.ru_stime,
    ]


def load(method: str, dtype: str, threads: int) -> dict[str, Any]:
    """Loads the engine in this process; returns the seconds of each program, and warnings."""
    import torch

    import outrider
    from outrider.core.errors import OutriderWarning

    torch.set_num_threads(threads)
    marks: list[tuple[str, list[float]]] = [(KERNELS, now())]

    def report(what: str, share: float) -> None:
        words = what.removeprefix("compiling, once: ").split()
        marks.append((" ".join(word for word in words if os.sep not in word), now()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OutriderWarning)
        outrider.load(method=method, dtype=dtype, compile="auto", report=report)
    marks.append(("", now()))
    stages = []
    for (what, began), (_, ended) in pairwise(marks):
        wall, python, compilers = (b - a for a, b in zip(began, ended, strict=True))
        stages.append({"what": what, "wall": wall, "python": python, "compilers": compilers})
    ours = [str(w.message) for w in caught if issubclass(w.category, OutriderWarning)]
    return {"stages": stages, "warnings": ours}


def measure(method: str, dtype: str, threads: int) -> dict[str, Any]:
    """Measures the first load and the second one, each in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        empty = {
            "OUTRIDER_CACHE": f"{folder}/outrider",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        }
        command = [sys.executable, "-m", __spec__.name, "--load", method, dtype, str(threads)]
        loads = [
            json.loads(
                subprocess.run(
                    command, env=os.environ | empty, stdout=subprocess.PIPE, check=True, text=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        ]
    return {"dtype": dtype, "first": loads[0], "second": loads[1]}


def total(loaded: dict[str, Any]) -> tuple[float, float]:
    """Seconds of wall-clock time, and of processor time."""
    stages = loaded["stages"]
    return sum(s["wall"] for s in stages), sum(s["python"] + s["compilers"] for s in stages)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    metadata = report["about"]
    lines = [
        "# First use, embedded pair",
        "",
        f"{metadata['date']}, {metadata['hardware']}, {metadata['threads']} threads, torch "
        f'{metadata["versions"]["torch"]}; `compile="auto"`, method {report["method"]}, γ 5, from '
        f"empty cache folders; one run. Processor time is that of Python and of the C++ "
        f"compilers that it runs. Load average before: {metadata['load']:.1f}; on an idle machine, "
        f"the wall-clock time is only slightly longer than the processor time.",
        "",
        f"Command: `{report['command']}`",
    ]
    for run in report["runs"]:
        (wall, busy), (wall_2, busy_2) = total(run["first"]), total(run["second"])
        lines += [
            "",
            f"## {run['dtype']}",
            "",
            f"First use {wall:.0f} s ({busy:.0f} s of processor time); later loads {wall_2:.1f} s "
            f"({busy_2:.1f} s).",
            "",
            "| compiled | wall clock, s | Python, s | C++ compilers, s |",
            "|---|---:|---:|---:|",
        ]
        for stage in run["first"]["stages"]:
            cells = (f"{stage[key]:.1f}" for key in ("wall", "python", "compilers"))
            lines.append(f"| {stage['what']} | {' | '.join(cells)} |")
        lines += ["", *(f"Warning: {text}" for text in run["first"]["warnings"])]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--method", default="speculative")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--load", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        method, dtype, threads = options.load
        print(json.dumps(load(method, dtype, int(threads))))
        return
    dtypes = " ".join(options.dtypes)
    report = {
        "about": run_metadata(repeats=1) | {"threads": options.threads, "load": os.getloadavg()[0]},
        "command": f"python -m benchmarks.first_use --dtypes {dtypes} --method {options.method} "
        f"--threads {options.threads}",
        "method": options.method,
        "runs": [measure(options.method, each, options.threads) for each in options.dtypes],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "first_use.json"
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
