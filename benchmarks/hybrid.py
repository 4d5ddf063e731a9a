"""Fusions of draft sources: copying and a draft model, alone and together, by kind of text.

    python -m benchmarks.hybrid [--repeats 3] [--texts 3] [--tokens 64] [--out DIR]

The embedded pair, batch 1, prefill included, at temperature 0 and 1. The parts are the draft model
(a chain), prompt lookup and suffix decoding. The fusions are a fixed order (suffix, then model, or
lookup before both), the bandit (separate for each request, or shared), and a tree of all sources or
of the copying ones. Kinds of text are those of ``benchmarks.copy_prompts``. ``edit`` is mostly
copied; its output is forced, so the draft model often matches it too. ``code`` and ``free`` are
the target's own outputs. No corpus of earlier outputs is kept, since every repeat has the same
prompts.

Each repeat runs every configuration on every prompt, in an order that rotates. Ratios are to plain
decoding in the same repeat: the median, the smallest and the largest. The bar compares each fusion
with the best of its parts on the same kind. Writes JSON and a Markdown table.
"""

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

import torch

import outrider
from benchmarks.copy_prompts import Kind
from benchmarks.copying import gain, tasks
from benchmarks.vs_transformers import hardware

TEMPERATURES = (0.0, 1.0)
KINDS: tuple[Kind, ...] = ("edit", "code", "free")
ALL = "lookup,suffix,model"
PARTS: dict[str, tuple[str, int | None, dict[str, object]]] = {
    "plain": ("plain", None, {}),
    "model, γ 5": ("speculative", 5, {}),
    "lookup": ("prompt-lookup", None, {}),
    "suffix": ("suffix", None, {"corpus_tokens": 0}),
}
FUSIONS: dict[str, tuple[str, int | None, dict[str, object]]] = {
    "order": ("hybrid", None, {}),
    "order, lookup first": ("hybrid", None, {"sources": ALL, "suffix_least": 1}),
    "bandit": ("hybrid", None, {"mode": "bandit"}),
    "bandit, lookup too": ("hybrid", None, {"mode": "bandit", "sources": ALL}),
    "bandit, learning together": ("hybrid", None, {"mode": "bandit", "learn": "all"}),
    "tree of copies": ("hybrid", None, {"mode": "tree", "sources": "lookup,suffix"}),
    "tree": ("hybrid", None, {"mode": "tree", "sources": ALL}),
}
DEFAULT = "order"
BAR = 0.98


def best_part(rows: dict[str, dict[str, Any]]) -> float:
    """The largest speed-up of a single source."""
    return max(rows[name]["ratio"] for name in PARTS)


def bars(gains: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> list[tuple[str, float, bool]]:
    """Each bar of ``hybrid`` with its speed relative to the best part, and whether it is met."""
    found = []
    for temperature, kinds in gains.items():
        for kind, rows in kinds.items():
            share = rows[DEFAULT]["ratio"] / best_part(rows)
            text = f"temperature {temperature}, {kind}: {BAR} of the best part"
            found.append((text, share, share >= BAR))
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = [
        "# Hybrid drafts",
        "",
        f"{about['date']}, {about['hardware']}, {about['threads']} threads, torch "
        f"{about['torch']}; embedded pair, {about['dtype']}, eager, batch 1, {about['texts']} "
        f"prompts per kind, at most {about['tokens']} tokens each, {about['repeats']} interleaved "
        f"repeats.{about['note']}",
        "",
        f"Command: `{about['command']}`",
        "",
        "Tokens per second, as multiples of plain decoding in the same repeat (smallest to "
        "largest); tokens per target pass; over the best part.",
    ]
    for temperature, kinds in report["gains"].items():
        lines += [
            "",
            f"## Temperature {temperature}",
            "",
            "| | " + " | ".join(kinds) + " |",
            "|---|" + "---:|" * len(kinds),
        ]
        for name in (*PARTS, *FUSIONS):
            cells = [_cell(name, rows) for rows in kinds.values()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", f"| bar, for `hybrid` by default ({DEFAULT}) | share | met |", "|---|---:|---|"]
    for text, share, met in bars(report["gains"]):
        lines.append(f"| {text} | {share:.2f} | {'yes' if met else 'no'} |")
    return "\n".join(lines) + "\n"


def _cell(name: str, rows: dict[str, dict[str, Any]]) -> str:
    row = rows[name]
    if name == "plain":
        return f"{row['tokens_per_second']:.0f}/s"
    cell = f"{row['ratio']:.2f}× ({row['smallest_ratio']:.2f}-{row['largest_ratio']:.2f}), "
    cell += f"{row['acceptance_length']:.1f}"
    return cell if name in PARTS else f"{cell}, {row['ratio'] / best_part(rows):.2f}"


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--note", default="", help="added to the page, for example other load")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pair = outrider.load(method="speculative")
    engines = {
        name: outrider.load(pair.target, pair.draft, method, gamma, options=settings)
        for name, (method, gamma, settings) in (PARTS | FUSIONS).items()
    }
    size = options.texts, options.tokens
    report: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "threads": options.threads,
            "torch": torch.__version__,
            "dtype": str(pair.target.module.dtype).removeprefix("torch."),
            "texts": options.texts,
            "tokens": options.tokens,
            "repeats": options.repeats,
            "note": f" {options.note}" if options.note else "",
            "command": f"python -m benchmarks.hybrid --repeats {options.repeats} "
            f"--texts {options.texts} --tokens {options.tokens}",
        },
        "gains": {
            f"{temperature:g}": {
                kind: gain(engines, tasks(kind, pair.target, *size, temperature), options.repeats)
                for kind in KINDS
            }
            for temperature in TEMPERATURES
        },
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "hybrid.json").write_text(json.dumps(report, indent=1) + "\n")
    page = markdown(report)
    (options.out / "hybrid.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
