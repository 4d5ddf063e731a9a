"""Outrider against transformers: the same pair, the same prompts, one run, interleaved.

    python -m benchmarks.vs_transformers [--target DIR --draft DIR] [--repeats 5] [--out DIR]

Everything runs eagerly, with batch 1 for transformers (its assisted generation accepts no larger
batches), and also batch 4 and 16 for Outrider. Each repeat runs every configuration once, in an
order that rotates. Tokens per second are measured over whole calls, prefill included. The table has
medians, the spread from the slowest to the fastest repeat, and ratios. Writes JSON and a Markdown
table.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import outrider
from benchmarks import page
from benchmarks.configurations import Configuration, Outrider, Transformers
from outrider import Stats
from outrider.runtime import HFModel

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "    def __repr__(self):\n        return ",
    'def read_lines(path):\n    """Read a text file."""\n    with open(path',
    "try:\n    import numpy as np\nexcept ImportError:\n    ",
    "class TestCase(unittest.TestCase):\n    def test_empty(self):\n        ",
    "for key, value in sorted(self.options.items()):\n    if ",
)


@dataclass
class Series:
    """All repeats of one configuration.

    Attributes:
        configuration: what runs.
        prompts: that it continues.
        tokens_per_second: of each repeat.
        stats: the engine's statistics of each repeat, if it has any.
    """

    configuration: Configuration
    prompts: Sequence[Sequence[int]]
    tokens_per_second: list[float] = field(default_factory=list)
    stats: list[Stats] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """Runs one repeat."""
        began = time.perf_counter()
        run = self.configuration(self.prompts, seed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.tokens_per_second.append(run.tokens / (time.perf_counter() - began))
        if run.stats is not None:
            self.stats.append(run.stats)

    def summary(self) -> dict[str, Any]:
        """Median, spread and the engine's statistics."""
        row: dict[str, Any] = {
            "median": statistics.median(self.tokens_per_second),
            "slowest": min(self.tokens_per_second),
            "fastest": max(self.tokens_per_second),
            "repeats": self.tokens_per_second,
        }
        if self.stats:
            total = Stats.total(self.stats)
            row |= total.as_dict()
            row["other_share"] = total.other_seconds / total.seconds
        return row


def configurations(
    target: HFModel, draft: HFModel, temperature: float, gammas: Sequence[int], tokens: int
) -> list[tuple[Configuration, int]]:
    """All configurations at one temperature, each with its number of prompts."""
    plain = outrider.load(target, method="plain")
    entries: list[tuple[Configuration, int]] = [
        (Transformers("transformers plain", target, None, 0, temperature, tokens), 8),
        (Outrider("outrider plain", plain, temperature, tokens), 8),
    ]
    for γ in gammas:
        engine = outrider.load(target, draft, num_speculative_tokens=γ)
        name = f"transformers assisted γ={γ}"
        entries += [
            (Transformers(name, target, draft, γ, temperature, tokens), 8),
            (Outrider(f"outrider speculative γ={γ}", engine, temperature, tokens), 8),
        ]
    engine = outrider.load(target, draft, num_speculative_tokens=5)
    for size in (4, 16):
        entries += [
            (Outrider(f"outrider plain, batch {size}", plain, temperature, tokens, True), size),
            (Outrider(f"outrider γ=5, batch {size}", engine, temperature, tokens, True), size),
        ]
    return entries


def measure(
    entries: list[tuple[Configuration, int]], prompts: Sequence[Sequence[int]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Interleaved repeats after one unmeasured warm-up of each configuration."""
    series = [
        Series(configuration, [prompts[i % len(prompts)] for i in range(count)])
        for configuration, count in entries
    ]
    for one in series:
        one.configuration(one.prompts[:1], 0)
    for repeat in range(repeats):
        for i in range(len(series)):
            series[(i + repeat) % len(series)].run(seed=repeat)
    return {one.configuration.name: one.summary() for one in series}


def ratios(rows: dict[str, dict[str, Any]], gammas: Sequence[int]) -> dict[str, float]:
    """The ratios between Outrider and transformers, and between plain and speculative decoding."""
    speed = {name: row["median"] for name, row in rows.items()}
    found = {
        "outrider plain / transformers plain": speed["outrider plain"]
        / speed["transformers plain"],
        "outrider plain, batch 16 / batch 1": speed["outrider plain, batch 16"]
        / speed["outrider plain"],
    }
    for γ in gammas:
        ours = speed[f"outrider speculative γ={γ}"]
        theirs = speed[f"transformers assisted γ={γ}"]
        found[f"outrider speculative γ={γ} / transformers assisted γ={γ}"] = ours / theirs
        found[f"outrider speculative γ={γ} / outrider plain"] = ours / speed["outrider plain"]
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    library = page.version("transformers", about)
    settings = (
        f"transformers {library}, {about['dtype']}, eager. {about['max_new_tokens']} "
        f"new tokens per prompt, median of {about['repeats']} interleaved repeats."
    )
    lines = page.header("Outrider against transformers", about, settings)
    heads = ("", "tokens/s", "spread", "acceptance length", "α", "outside the models")
    for temperature, part in report["temperatures"].items():
        ratios = [(name, f"{value:.2f}") for name, value in part["ratios"].items()]
        lines += ["", f"## Temperature {temperature}"]
        lines += page.table(heads, (_row(*each) for each in part["rows"].items()))
        lines += page.table(("ratio of medians", ""), ratios)
    return "\n".join(lines) + "\n"


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    more = ["", "", ""]
    if "rounds" in row:
        alpha = f"{row['alpha']:.2f}" if row["drafted"] else "–"
        more = [f"{row['acceptance_length']:.2f}", alpha, f"{row['other_share']:.1%}"]
    return name, f"{row['median']:.1f}", f"{row['slowest']:.1f}–{row['fastest']:.1f}", *more


def main() -> None:
    """Parses the options, measures, writes the report and prints the table."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--target", default="embedded", help="folder or hub id")
    parser.add_argument("--draft", help="folder or hub id; not needed with the embedded target")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gammas", type=int, nargs="+", default=[3, 5, 8])
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    engine = outrider.load(options.target, options.draft)
    target, draft = engine.target, engine.draft
    assert draft is not None
    prompts = [engine.encode(prompt) for prompt in PROMPTS]
    report: dict[str, Any] = {
        "about": page.about(
            "python -m benchmarks.vs_transformers"
            + (f" --target {options.target}" if options.target != "embedded" else ""),
            dtype=str(target.dtype).removeprefix("torch."),
            target=options.target,
            repeats=options.repeats,
            max_new_tokens=options.max_new_tokens,
        ),
        "temperatures": {},
    }
    for temperature in (0.0, 0.8):
        entries = configurations(target, draft, temperature, options.gammas, options.max_new_tokens)
        rows = measure(entries, prompts, options.repeats)
        report["temperatures"][str(temperature)] = {
            "rows": rows,
            "ratios": ratios(rows, options.gammas),
        }
    page.publish(options.out, "vs_transformers", report, markdown(report))


if __name__ == "__main__":
    main()
