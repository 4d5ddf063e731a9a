"""Measures what online adaptation costs: the throughput beside that of a frozen engine.

    python -m benchmarks.online [--niceness 10 19] [--bursts 12] [--tokens 48] [--compile auto]

Two engines with the same weights continue the same prompts, burst by burst in alternation. One is
frozen. The other is adapted: it collects the target's distributions, a trainer in a process of its
own takes steps on the same processors at low priority, and new weights are tried and exchanged. A
signal stops the trainer during the frozen engine's bursts. The prompts are those of the second text
of ``recipes/online_shift.py``, which measures α. The interval of the ratio is a bootstrap over
pairs of bursts. Writes JSON and Markdown.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks import page
from outrider import Engine, Sampling, load
from outrider.lab.metadata import command_line
from outrider.train.online import AdaptSettings
from outrider.train.online.process import ProcessWorker
from recipes.online_shift import SETTINGS, default_texts, prompts_of

BAR = 0.9
DRAWS, CONFIDENCE = 2000, 0.95
SEED = 17


def ratio(pairs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The adapted engine's tokens per second over the frozen engine's, with its interval."""
    rows_PN = np.array([[each[name] for name in _COUNTED] for each in pairs])
    share_P = np.full(len(pairs), 1 / len(pairs))
    times_DP = np.random.default_rng(0).multinomial(len(pairs), share_P, DRAWS)
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(_ratio(times_DP @ rows_PN), [edge, 1 - edge])
    value = _ratio(rows_PN.sum(0, keepdims=True))[0]
    return {"ratio": float(value), "low": float(low), "high": float(high)}


_COUNTED = ("online tokens", "online seconds", "frozen tokens", "frozen seconds")


def _ratio(sums_DN: Any) -> Any:
    online_D, frozen_D = sums_DN[:, 0] / sums_DN[:, 1], sums_DN[:, 2] / sums_DN[:, 3]
    return online_D / frozen_D


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """Stops a process for a while; None stops nothing."""
    if pid is None:
        yield
        return
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def timed(engine: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> tuple[Any, float]:
    """The statistics of a burst, and its seconds, prompts included."""
    began = time.perf_counter()
    stats = engine.generate([list(prompt) for prompt in prompts], sampling).stats
    return stats, time.perf_counter() - began


def measure(
    frozen: Engine,
    online: Engine,
    bursts: Sequence[list[list[int]]],
    settings: AdaptSettings,
    num_tokens: int,
) -> dict[str, Any]:
    """Both engines' bursts, and what the trainer did meanwhile."""
    sampling = Sampling(temperature=1.0, max_new_tokens=num_tokens, ignore_eos=True, seed=SEED)
    pairs = []
    with online.adapt(settings=settings) as adaptation:
        worker = adaptation._worker
        pid = worker.pid if isinstance(worker, ProcessWorker) else None
        adaptation.flush()  # once it has started
        for engine in (frozen, online):
            timed(engine, bursts[0], sampling)
        first = adaptation.state.step
        for number, prompts in enumerate(bursts):
            pair: dict[str, Any] = {}
            names = ("frozen", "online") if number % 2 else ("online", "frozen")
            for name in names:
                if name == "frozen":
                    with stopped(pid):
                        stats, seconds = timed(frozen, prompts, sampling)
                else:
                    stats, seconds = timed(online, prompts, sampling)
                pair |= {
                    f"{name} tokens": float(stats.emitted),
                    f"{name} seconds": seconds,
                    f"{name} α": stats.alpha,
                }
            pairs.append(pair)
        state = adaptation.state
    return {
        **ratio(pairs),
        "steps": state.step - first,
        "positions": state.tokens_seen,
        "versions": len(state.versions),
        "pairs": pairs,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    settings = (
        f"target {about['target']}, {about['dtype']}, compile {about['compile']}, γ "
        f"{about['gamma']}, temperature 1, {about['bursts']} bursts of {about['burst']} requests "
        f"of {about['tokens']} tokens. Engines and trainer share {about['cores']} of the machine's "
        f"{about['machine_cores']} cores; the engines' niceness is {about['nice']}; load of the "
        f"machine {about['load']:.1f} as the run began.{about['note']}"
    )
    lines = page.header("Throughput while a draft model is adapted", about, settings)
    lines += [
        "",
        "Tokens per second while a trainer learns in a process of its own, over those of a frozen "
        "engine with the trainer stopped; bursts alternate (95 % interval over pairs of bursts). "
        "Niceness is the trainer's, added to the engines'.",
    ]
    heads = ("niceness", "frozen tokens/s", "adapted tokens/s", "ratio", "steps", "positions", "α")
    lines += page.table(heads, (_line(each) for each in report["rows"]))
    lines += page.bars_table(
        (
            f"niceness {each['niceness']}: at least {BAR} of the frozen engine",
            f"{each['ratio']:.2f}",
            each["ratio"] >= BAR,
        )
        for each in report["rows"]
    )
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    pairs = row["pairs"]

    def speed(name: str) -> float:
        tokens = sum(pair[f"{name} tokens"] for pair in pairs)
        return float(tokens / sum(pair[f"{name} seconds"] for pair in pairs))

    def alpha(name: str) -> float:
        return float(np.mean([pair[f"{name} α"] for pair in pairs]))

    return (
        str(row["niceness"]),
        f"{speed('frozen'):.0f}",
        f"{speed('online'):.0f}",
        f"{row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})",
        str(row["steps"]),
        str(row["positions"]),
        f"{alpha('frozen'):.3f} and {alpha('online'):.3f}",
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures at each niceness of the trainer."""
    load_average = os.getloadavg()[0]

    def engine() -> Engine:
        return load(
            options.target,
            options.draft or ("embedded" if options.target == "embedded" else None),
            num_speculative_tokens=options.gamma,
            max_batch_size=options.burst,
            compile=options.compile,
            dtype="bfloat16",
        )

    frozen = engine()
    _, second = default_texts()
    prompts = prompts_of(frozen, second, options.bursts * options.burst, SEED)
    size = options.burst
    bursts = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    rows = []
    for niceness in options.niceness:
        settings = replace(SETTINGS, where="process", niceness=niceness, threads=1)
        found = measure(frozen, engine(), bursts, settings, options.tokens)
        rows.append({"niceness": niceness, **found})
        print(f"niceness {niceness}: {found['ratio']:.3f}", file=sys.stderr, flush=True)
    names = ("target", "compile", "gamma", "bursts", "burst", "tokens")
    about = page.about(
        command_line(),
        **{name: getattr(options, name) for name in names},
        dtype=str(frozen.target.dtype).removeprefix("torch."),
        cores=len(os.sched_getaffinity(0)),
        machine_cores=os.cpu_count(),
        load=load_average,
        nice=os.nice(0),
        note=f" {options.note}" if options.note else "",
    )
    return {"about": about, "rows": rows}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = page.parser(__doc__, threads=1)
    parser.add_argument("--target", default="embedded", help="folder or hub id")
    parser.add_argument("--draft", help="draft model or EAGLE-3 head")
    parser.add_argument("--niceness", type=int, nargs="+", default=[10, 19])
    parser.add_argument("--bursts", type=int, default=12)
    parser.add_argument("--burst", type=int, default=4, help="requests that run together")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--compile", default="auto", choices=["off", "auto"])
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    return parser.parse_args(argv)


def main() -> None:
    """Parses the options, measures, writes the results and prints the page."""
    options = arguments()
    torch.set_num_threads(options.threads)
    report = run(options)
    page.publish(options.out, "online", report, markdown(report))


if __name__ == "__main__":
    main()
