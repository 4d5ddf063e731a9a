"""The cost and the gain of drafts by copying: prompt lookup and suffix decoding.

    python -m benchmarks.copying [--repeats 5] [--texts 6] [--tokens 64] [--out DIR]

Cost: microseconds per draft and bytes per token at 8,000 tokens of context, batch 1 and 16
(``benchmarks.copy_cost``).

Gain: tokens per second of the embedded pair, batch 1, prefill included, by kind of text
(``benchmarks.copy_prompts``). In ``edit`` and ``repeat``, the output is the copy, forced by
``Sampling.forced``; in ``code`` and ``free``, it is the target's own. Each repeat runs every method
on every prompt, in an order that rotates. Ratios are to plain decoding in the same repeat: the
median, the smallest and the largest. ``suffix, asked before`` keeps a corpus of outputs, which
contains all of them after the first repeat; the other methods keep none. Writes JSON and a Markdown
table.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import outrider
from benchmarks.copy_cost import CONTEXT, CORPUS, ROWS, configurations, cost
from benchmarks.copy_prompts import KINDS, Kind, documents, prompts
from benchmarks.vs_transformers import hardware
from outrider import Engine, Sampling, Stats
from outrider.runtime import HFModel

METHODS: dict[str, tuple[str, int, dict[str, object]]] = {
    "plain": ("plain", 1, {}),
    "speculative, γ 5": ("speculative", 5, {}),
    "prompt lookup": ("prompt-lookup", 10, {}),
    "suffix": ("suffix", 16, {"corpus_tokens": 0}),
    "suffix, tree": ("suffix", 16, {"corpus_tokens": 0, "shape": "tree"}),
    "suffix, asked before": ("suffix", 16, {}),
}
BARS = {"microseconds": 50.0, "bytes": 100.0, "gain": 1.8}


# ------------------------------------------------------------------------------------------ gain


@dataclass(frozen=True)
class Task:
    """A prompt with its sampling parameters."""

    prompt: tuple[int, ...]
    sampling: Sampling


def tasks(kind: Kind, target: HFModel, num: int, tokens: int, temperature: float) -> list[Task]:
    """The prompts of a kind; references are forced as outputs."""
    assert target.tokenizer is not None
    made = []
    for prompt in prompts(kind, num):
        ids = tuple(target.tokenizer(prompt.text)["input_ids"])[-512:]
        forced = dict(enumerate(target.tokenizer(prompt.reference)["input_ids"][:tokens]))
        length = len(forced) or tokens
        sampling = Sampling(
            temperature=temperature, max_new_tokens=length, ignore_eos=True, forced=forced
        )
        made.append(Task(ids, sampling))
    return made


def gain(engines: dict[str, Engine], work: list[Task], repeats: int) -> dict[str, dict[str, Any]]:
    """Tokens per second of each method, and its ratio to plain, repeat by repeat."""
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    stats: dict[str, list[Stats]] = {name: [] for name in engines}
    for repeat in range(-1, repeats):  # the first is warm-up, with one prompt only
        names = list(engines)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            began = time.perf_counter()
            done = [
                engines[name].generate([task.prompt], task.sampling).stats
                for task in (work if repeat >= 0 else work[:1])
            ]
            seconds = time.perf_counter() - began
            if repeat >= 0:
                stats[name] += done
                speeds[name].append(sum(each.emitted for each in done) / seconds)
    rows = {}
    for name, found in speeds.items():
        ratios = [mine / plain for mine, plain in zip(found, speeds["plain"], strict=True)]
        total = Stats.total(stats[name])
        rows[name] = {
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(ratios),
            "smallest_ratio": min(ratios),
            "largest_ratio": max(ratios),
            "acceptance_length": total.acceptance_length,
            "acceptance_rate": total.acceptance_rate,
            "other_share": total.other_seconds / total.seconds,
        }
    return rows


# ---------------------------------------------------------------------------------------- report


def bars(report: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """Each bar with the worst measured value, and whether it is met."""
    largest = max(row["bytes"] for row in report["cost"])
    found = [("an index takes at most 100 bytes per token", largest, largest <= BARS["bytes"])]
    for rows in sorted({row["rows"] for row in report["cost"]}):
        slowest = max(row["median"] for row in report["cost"] if row["rows"] == rows)
        text = f"every draft takes at most 50 µs per row, rows: {rows}"
        found.append((text, slowest, slowest <= BARS["microseconds"]))
    for kind in ("edit", "repeat"):
        ratio = report["gain"][kind]["prompt lookup"]["ratio"]
        found.append((f"prompt lookup, {kind}: 1.8× plain", ratio, ratio >= BARS["gain"]))
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, kinds = report["about"], list(report["gain"])
    lines = [
        "# Copying drafts",
        "",
        f"{about['date']}, {about['hardware']}, threads: {about['threads']}, torch "
        f"{about['torch']}; embedded pair, {about['dtype']}, eager, batch 1, temperature "
        f"{about['temperature']:g}, {about['texts']} prompts per kind, at most {about['tokens']} "
        f"tokens each, {about['repeats']} interleaved repeats.{about['note']}",
        "",
        f"Command: `{about['command']}`",
        "",
        f"## Cost of a draft at {about['context']:,} tokens of context",
        "",
        "| | rows | µs per row, median | 5 % | quartiles | 95 % | tokens drafted | accepted | "
        "bytes per token | µs per token of prompt |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["cost"]:
        lines.append(
            f"| {row['name']} | {row['rows']} | {row['median']:.0f} | {row['5th']:.0f} | "
            f"{row['lower_quartile']:.0f}-"
            f"{row['upper_quartile']:.0f} | {row['95th']:.0f} | {row['drafted']:.1f} | "
            f"{row['accepted']:.1f} | {row['bytes']:.0f} | {row['start_per_token']:.1f} |"
        )
    lines += [
        "",
        "## Gain over plain decoding, by kind of text",
        "",
        "Tokens per second, as multiples of plain decoding in the same repeat (smallest to "
        "largest); tokens per target pass.",
        "",
        "| | " + " | ".join(kinds) + " |",
        "|---|" + "---:|" * len(kinds),
    ]
    for name in report["gain"][kinds[0]]:
        cells = []
        for kind in kinds:
            row = report["gain"][kind][name]
            cells.append(
                f"{row['tokens_per_second']:.0f}/s"
                if name == "plain"
                else f"{row['ratio']:.2f}× ({row['smallest_ratio']:.2f}-"
                f"{row['largest_ratio']:.2f}), {row['acceptance_length']:.1f}"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| bar | worst | met |", "|---|---:|---|"]
    for text, worst, met in bars(report):
        lines.append(f"| {text} | {worst:.2f} | {'yes' if met else 'no'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = outrider.load(method="plain")
    target = plain.target
    assert target.tokenizer is not None
    ids = [token for each in documents() for token in target.tokenizer(each.text)["input_ids"]]
    text, earlier = ids[: CONTEXT + 2500], ids[CONTEXT + 2500 :][:CORPUS]
    report: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "threads": options.threads,
            "torch": torch.__version__,
            "dtype": str(target.module.dtype).removeprefix("torch."),
            "temperature": options.temperature,
            "texts": options.texts,
            "tokens": options.tokens,
            "repeats": options.repeats,
            "context": CONTEXT,
            "note": f" {options.note}" if options.note else "",
            "command": f"python -m benchmarks.copying --repeats {options.repeats} "
            f"--texts {options.texts} --tokens {options.tokens} --threads {options.threads}"
            + (f" --temperature {options.temperature:g}" if options.temperature else ""),
        },
        "cost": [
            {"name": each.name} | cost(each, text, CONTEXT, rows)
            for rows in ROWS
            for each in configurations(earlier)
        ],
        "gain": {},
    }
    draft = outrider.load(target, "embedded", method="speculative").draft
    engines = {
        name: outrider.load(target, draft, method, gamma, options=settings)
        for name, (method, gamma, settings) in METHODS.items()
    }
    for kind in KINDS:
        work = tasks(kind, target, options.texts, options.tokens, options.temperature)
        report["gain"][kind] = gain(engines, work, options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "copying.json").write_text(json.dumps(report, indent=1) + "\n")
    page = markdown(report)
    (options.out / "copying.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
