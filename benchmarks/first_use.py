"""Duration of the first use: compiling kernels and programs.

    python -m benchmarks.first_use [--dtypes float32 bfloat16] [--method speculative]
        [--target embedded] [--draft FOLDER] [--name first_use]

Each precision is loaded with ``compile="auto"`` in its own process with empty cache folders, and
then a second time with the filled caches. For each program, measures the wall clock and the
processor time (Python, and the C++ compilers that it runs). A third process, again with empty
folders, is loaded with ``background=True`` and generates one output after the other, a second
apart: when do the first token, the first one by kernels, the first one of compiled layers and the
first one of a compiled forward pass come, and how fast are outputs from then on? It starts as
commands of ``outrider`` do: the process that compiles is started before torch is imported. A fourth
process does so with the filled caches. Times of tokens are those since the start of the process.
Writes JSON and Markdown.
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
from statistics import median
from typing import Any

from benchmarks import page

EMBEDDED = "embedded"
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


def load(
    method: str, dtype: str, threads: int, target: str = EMBEDDED, draft: str | None = None
) -> dict[str, Any]:
    """Loads the engine in this process; returns the seconds of each program, and warnings."""
    import torch

    import outrider
    from outrider.core.errors import OutriderWarning

    torch.set_num_threads(threads)
    marks: list[tuple[str, list[float]]] = [(KERNELS, now())]

    def report(what: str, share: float | None) -> None:
        words = what.removeprefix("compiling, once: ").split()
        marks.append((" ".join(word for word in words if os.sep not in word), now()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OutriderWarning)
        outrider.load(target, draft, method, dtype=dtype, compile="auto", report=report)
    marks.append(("", now()))
    stages = []
    for (what, began), (_, ended) in pairwise(marks):
        wall, python, compilers = (b - a for a, b in zip(began, ended, strict=True))
        stages.append({"what": what, "wall": wall, "python": python, "compilers": compilers})
    ours = [str(w.message) for w in caught if issubclass(w.category, OutriderWarning)]
    return {"stages": stages, "warnings": ours}


def first_tokens(
    method: str, dtype: str, threads: int, target: str = EMBEDDED, draft: str | None = None
) -> dict[str, Any]:
    """Seconds from the start of this process, of Python included, to the first token, to the first
    ones by kernels, of compiled layers of the target and of a compiled forward pass, if they come,
    and until the compiler has ended; the median speed of outputs from each of these on, in tokens
    per second, first outputs excepted; and the number of programs that are missing at the end."""
    from outrider.cli.start import start

    start(compiles=True)  # as the commands do before these imports

    import torch

    import outrider

    torch.set_num_threads(threads)
    engine = outrider.load(target, draft, method, dtype=dtype, compile="auto", background=True)
    sampling = outrider.Sampling(temperature=0, max_new_tokens=16, ignore_eos=True)
    seconds: dict[str, float] = {}
    speeds: dict[str, list[float]] = {}
    running = True
    while running:
        running = engine.compiler is not None and engine.compiler.is_running
        began = time.perf_counter()
        for _ in engine.stream("def read_text(path):\n", sampling):
            seconds.setdefault(_running_by(engine.target), time.time() - _began())
        speed = sampling.max_new_tokens / (time.perf_counter() - began)
        speeds.setdefault(_running_by(engine.target), []).append(speed)
        if engine.compiler is not None:
            engine.compiler.wait(1)
    seconds["all programs"] = time.time() - _began()
    return {
        "seconds": seconds,
        "speeds": {what: median(found[1:] or found) for what, found in speeds.items()},
        "missing": engine.compiler.num_missing if engine.compiler else 0,
    }


def _running_by(target: Any) -> str:
    """What the target's tokens are called by what computes them now."""
    from outrider.runtime.executors.compile_cache import uses_kernels

    if not uses_kernels(target.module):
        return "first token"
    if target.compiled is None or not target.compiled.has_programs:
        return "first token by kernels"
    has_chain = target.compiled.has_chain(target.hidden_layers)
    return "first compiled token" if has_chain else "first token of compiled layers"


def _began() -> float:
    """When this process started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def measure(method: str, dtype: str, threads: int, *models: str) -> dict[str, Any]:
    """Measures the first load, the second one, the first tokens in the background and those of a
    later start, each in its own process.

    Args:
        method: how to decode.
        dtype: of the models.
        threads: of each process.
        *models: the target; and a draft or head, if any.
    """
    settings = method, dtype, str(threads), *models
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        first, second, tokens, later = (
            _in_process(what, settings, folder)
            for what, folder in (
                ("--load", one),
                ("--load", one),
                ("--tokens", other),
                ("--tokens", one),
            )
        )
    found = {"first": first, "second": second, "background": tokens, "later": later}
    return {"dtype": dtype} | found


def _in_process(what: str, arguments: Sequence[str], folder: str) -> Any:
    """What this script prints in a process of its own with these cache folders."""
    folders = {
        "OUTRIDER_CACHE": f"{folder}/outrider",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
    }
    command = [sys.executable, "-m", __spec__.name, what, *arguments]
    done = subprocess.run(
        command, env=os.environ | folders, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def total(loaded: dict[str, Any]) -> tuple[float, float]:
    """Seconds of wall-clock time, and of processor time."""
    stages = loaded["stages"]
    return sum(s["wall"] for s in stages), sum(s["python"] + s["compilers"] for s in stages)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = page.header(
        f"First use, {about['target']}",
        about,
        f'`compile="auto"`, method {about["method"]}, γ 5, from empty cache folders; one run. '
        f"Processor time is that of Python and of the C++ compilers that it runs. Load average "
        f"before: {about['load']:.1f}; on an idle machine, the wall-clock time is only slightly "
        f"longer than the processor time.",
    )
    for run in report["runs"]:
        (wall, busy), (wall_2, busy_2) = total(run["first"]), total(run["second"])
        lines += [
            "",
            f"## {run['dtype']}",
            "",
            f"First use {wall:.0f} s ({busy:.0f} s of processor time); later loads {wall_2:.1f} s "
            f"({busy_2:.1f} s).{_shown_later(run.get('later'))}",
        ]
        lines += page.table(
            ("compiled", "wall clock, s", "Python, s", "C++ compilers, s"),
            (
                (each["what"], *(f"{each[key]:.1f}" for key in ("wall", "python", "compilers")))
                for each in run["first"]["stages"]
            ),
        )
        speeds = run["background"].get("speeds", {})
        shown = "; ".join(
            f"{what} after {seconds:.0f} s"
            + (f", then {speeds[what]:.0f} tokens per second" if what in speeds else "")
            for what, seconds in run["background"]["seconds"].items()
        )
        missing = run["background"]["missing"]
        lines += ["", f"In the background: {shown}; {missing} programs missing at the end."]
        lines += ["", *(f"Warning: {text}" for text in run["first"]["warnings"])]
    return "\n".join(lines).rstrip() + "\n"


def _shown_later(later: dict[str, Any] | None) -> str:
    """The time of the first token of a later start; pages of older runs have none."""
    if later is None:
        return ""
    seconds = min(later["seconds"].values())
    return f" A later start gives its first token after {seconds:.1f} s, Python's imports included."


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--method", default="speculative")
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--draft", help="a draft model or head for the target")
    parser.add_argument("--name", default="first_use", help="of the files that are written")
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if asked := options.load or options.tokens:
        method, dtype, threads, *models = asked
        run = load if options.load else first_tokens
        print(json.dumps(run(method, dtype, int(threads), *models)))
        return
    dtypes = " ".join(options.dtypes)
    models = [options.target] + [options.draft] * (options.draft is not None)
    draft = f" --draft {options.draft}" if options.draft else ""
    about = page.about(
        f"python -m benchmarks.first_use --dtypes {dtypes} --method {options.method} "
        f"--threads {options.threads} --target {options.target}{draft}",
        method=options.method,
        target=options.target,
        load=os.getloadavg()[0],
    )
    report = {
        "about": about | {"threads": options.threads},  # of the processes that are measured
        "runs": [
            measure(options.method, each, options.threads, *models) for each in options.dtypes
        ],
    }
    page.publish(options.out, options.name, report, markdown(report))


if __name__ == "__main__":
    main()
