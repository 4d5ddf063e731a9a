"""α of cheap drafts: the table of Leviathan et al. (ICML 2023, Table 3), on the embedded pair.

    python -m benchmarks.alpha [--texts 32] [--tokens 128] [--megabytes 8] [--out DIR]

Each source drafts one token per round (γ = 1) for the embedded target, at temperature 0 and 1. α is
the mean of min(1, p(x)/q(x)) over the drafted positions, an unbiased estimate of Σ min(p, q), with
the standard error over outputs. At temperature 0, it is the share of drafted tokens that are the
target's argmax. A source that finds nothing to copy drafts nothing: coverage is the share of rounds
with a draft. The n-gram table is counted on ``--megabytes`` of this Python's standard library.
Writes JSON, and a Markdown table that also shows the paper's ranges.
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

import outrider
from benchmarks.vs_transformers import PROMPTS
from outrider import Sampling
from outrider.drafters.ngram.drafter import vocabulary_digest
from outrider.engine import Engine
from outrider.lab.metadata import hardware
from outrider.methods import find_method
from outrider.runtime import HFModel
from outrider.train.ngram import build_ngram
from outrider.train.ngram_documents import encoded

TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Source:
    """A source of drafts, and the range that the paper reports for sources of its kind."""

    name: str
    method: str
    options: dict[str, object] = field(default_factory=dict)
    paper: str = "-"


def sources(table: str) -> list[Source]:
    """All sources that are compared; ``table`` is the file of the n-gram table."""
    return [
        Source("unigram", "ngram", {"file": table, "order": 1}, "0.03-0.13"),
        Source("bigram", "ngram", {"file": table, "order": 2}, "0.05-0.23"),
        Source("4-gram", "ngram", {"file": table, "order": 4}),
        Source("prompt lookup", "prompt-lookup"),
        Source("suffix decoding", "suffix"),
        Source("early exit, half the layers", "early-exit"),
        Source("1-layer draft", "speculative", {}, "0.53-0.89 (draft models)"),
    ]


def library(megabytes: float) -> Iterator[str]:
    """Source files of this Python's standard library, in the order of their paths."""
    left = megabytes * 1e6
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def count(target: HFModel, megabytes: float, file: Path) -> dict[str, Any]:
    """Builds the n-gram table; returns the numbers of its tokens and grams."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    digest = vocabulary_digest(tokenizer.get_vocab())
    texts = encoded(tokenizer, library(megabytes))
    return build_ngram(file, texts, target.num_tokens, 4, vocabulary=digest)


def measure(
    pair: tuple[HFModel, HFModel], source: Source, temperature: float, texts: int, tokens: int
) -> dict[str, float]:
    """α with its standard error over outputs, and coverage."""
    engine = Engine(
        *pair,
        find_method(source.method),
        num_speculative_tokens=1,
        options=source.options,
        measure=False,
    )
    sampling = Sampling(temperature=temperature, max_new_tokens=tokens, ignore_eos=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(texts)]
    results = engine.generate(prompts, sampling)
    alphas = [r.stats.alpha for r in results if r.stats.verified]
    total = results.stats
    return {
        "alpha": total.alpha,
        "error": statistics.stdev(alphas) / len(alphas) ** 0.5 if len(alphas) > 1 else 0.0,
        "coverage": total.verified / total.rounds,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    lines = [
        "# α of cheap drafts",
        "",
        f"{about['date']}, {about['hardware']}, embedded target in {about['dtype']}; "
        f"{about['texts']} outputs of {about['tokens']} tokens per cell; n-grams counted on "
        f"{about['ngram_tokens']:,} tokens. α ± standard error over outputs; coverage: share of "
        "rounds with a draft. Last column: Leviathan et al., Table 3, over their "
        "models and tasks.",
        "",
        f"Command: `{about['command']}`",
        "",
        "| source | α, T = 0 | α, T = 1 | coverage, T = 0 / 1 | paper |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        cold, warm = row["cells"]
        lines.append(
            f"| {row['name']} | {_cell(cold)} | {_cell(warm)} | "
            f"{cold['coverage']:.0%} / {warm['coverage']:.0%} | {row['paper']} |"
        )
    return "\n".join(lines) + "\n"


def _cell(cell: dict[str, float]) -> str:
    return f"{cell['alpha']:.3f} ± {cell['error']:.3f}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Builds the n-gram table, then measures every source."""
    engine = outrider.load()
    assert engine.draft is not None
    pair = engine.target, engine.draft
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "library.safetensors"
        figures = count(engine.target, options.megabytes, file)
        rows = []
        for source in sources(str(file)):
            print(source.name, flush=True)
            cells = [measure(pair, source, t, options.texts, options.tokens) for t in TEMPERATURES]
            rows.append({"name": source.name, "paper": source.paper, "cells": cells})
    return {
        "about": {
            "date": date.today().isoformat(),
            "hardware": hardware(),
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "texts": options.texts,
            "tokens": options.tokens,
            "ngram_tokens": figures["tokens"],
            "command": f"python -m benchmarks.alpha --texts {options.texts} --tokens "
            f"{options.tokens} --megabytes {options.megabytes:g}",
        },
        "rows": rows,
    }


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = run(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "alpha.json").write_text(json.dumps(report, indent=1) + "\n")
    page = markdown(report)
    (options.out / "alpha.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
