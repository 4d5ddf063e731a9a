"""Plain decoding beside another process that wants a processor: tokens per second with all threads,
with one thread, and with threads that give way (decision 0072).

    python -m benchmarks.beside [--target embedded] [--dtype float32] [--seconds 3] [--repeats 2]
        [--threads N]

There are as many threads as processors unless ``--threads`` says otherwise. The other process
computes without a pause or a part of the time, at some niceness, in the session of this process or
in its own; Linux shares processors between sessions first. Beside each kind of process, decoding
takes turns at the three ways. Wall clock; outputs of 64 tokens, of which the first of each turn
does not count. Writes JSON and Markdown.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import outrider
from benchmarks import page
from outrider import Engine, Sampling
from outrider.lab.metadata import command_line
from outrider.runtime.host_processors import num_processors

_PROMPT = "def read_text(path):\n"
_TOKENS = 64


class Other(NamedTuple):
    """A process that computes.

    Attributes:
        share: the part of the time in which it computes; 0 stands for no process.
        period: seconds of a pause and of what it computes in between.
        own_session: whether it leads a session of its own.
        niceness: how much less it wants the processor than others of its session.
    """

    share: float
    period: float = 0.02
    own_session: bool = True
    niceness: int = 0

    def __str__(self) -> str:
        if not self.share:
            return "no other process"
        session = "its own session" if self.own_session else "our session"
        pauses = "" if self.share == 1 else f", {self.share:.0%} of every {self.period:g} s"
        return f"{session}, niceness {self.niceness}{pauses}"


OTHERS = (
    Other(0),
    Other(1, own_session=False),
    Other(1),
    Other(1, own_session=False, niceness=10),
    Other(1, niceness=10),
    Other(0.05),
    Other(0.2),
    Other(0.2, period=0.2),
    Other(0.5),
    Other(0.5, period=0.2),
)

_COMPUTE = """
import os, sys, time
share, period, niceness = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
os.nice(niceness)
print(flush=True)
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < share * period:
        pass
    if share < 1:
        time.sleep((1 - share) * period)
"""


@contextmanager
def running(other: Other) -> Iterator[None]:
    """Lets the other process compute."""
    if not other.share:
        yield
        return
    settings = [str(other.share), str(other.period), str(other.niceness)]
    process = subprocess.Popen(
        [sys.executable, "-c", _COMPUTE, *settings],
        stdout=subprocess.PIPE,
        start_new_session=other.own_session,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()


WAYS = ("all threads", "one thread", "threads that give way")


def ways(engine: Engine, threads: int) -> dict[str, Callable[[], None]]:
    """For each of the three ways, a function that makes the engine compute so."""

    def use(num: int, looks: bool) -> None:
        torch.set_num_threads(num)
        engine._ignores_threads = looks  # threads give way only in engines where this is true

    settings = (partial(use, threads, False), partial(use, 1, False), partial(use, threads, True))
    return dict(zip(WAYS, settings, strict=True))


def speed(engine: Engine, seconds: float) -> float:
    """Tokens per second of outputs that are generated one after the other. No output begins after
    so many seconds, and the last one counts in full."""
    sampling = Sampling(temperature=0, max_new_tokens=_TOKENS, ignore_eos=True)
    engine.generate([_PROMPT], sampling)
    began = time.perf_counter()
    num = 0
    while not num or time.perf_counter() - began < seconds:
        engine.generate([_PROMPT], sampling)
        num += _TOKENS
    return num / (time.perf_counter() - began)


def measure(engine: Engine, threads: int, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """The speeds of all ways beside each other process, in turns."""
    rows = []
    for other in OTHERS:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        with running(other):
            for _ in range(repeats):
                for way, use in ways(engine, threads).items():
                    use()
                    found[way].append(speed(engine, seconds))
        rows.append({"other": str(other), "speeds": found})
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = page.header(
        "Beside another process",
        about,
        f"{about['processors']} processors, {about['target']} target, {about['dtype']}, plain "
        f"decoding, batch 1, temperature 0; tokens per second of each turn.",
    )
    rows = (
        (row["other"], *(", ".join(f"{each:.0f}" for each in row["speeds"][way]) for way in WAYS))
        for row in report["rows"]
    )
    return "\n".join([*lines, *page.table(("the other process", *WAYS), rows)]) + "\n"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = page.parser(__doc__, threads=num_processors())
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each way")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    engine = outrider.load(options.target, method="plain", dtype=options.dtype, compile="auto")
    rows = measure(engine, options.threads, options.seconds, options.repeats)
    about = page.about(
        command_line(),
        target=options.target,
        dtype=options.dtype,
        processors=num_processors(),
    )
    report = {"about": about | {"threads": options.threads}, "rows": rows}
    page.publish(options.out, "beside", report, markdown(report))


if __name__ == "__main__":
    main()
