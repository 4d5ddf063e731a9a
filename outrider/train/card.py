"""The model card: training data, training run, hardware, and measured quality of a model."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.train.evaluate import PairReport

_HEADER = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, speculative-decoding]
---
"""


def hardware() -> str:
    """The processor, its cores and torch's version, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def corpus_table(manifest: Mapping[str, Any]) -> str:
    """The sources of the corpus as a Markdown table, with their licences and sizes."""
    lines = [
        "| source | version | licence | files | bytes | tokens |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in manifest["sources"]:
        lines.append(
            f"| {row['name']} | {row['version']} | {row['licence']} | {row['files']:,} "
            f"| {row['bytes']:,} | {row['tokens']:,} |"
        )
    totals = [sum(row[key] for row in manifest["sources"]) for key in ("files", "bytes", "tokens")]
    lines.append("| **total** | | | " + " | ".join(f"{total:,}" for total in totals) + " |")
    return "\n".join(lines)


def pair_table(report: PairReport) -> str:
    """α by temperature and the cost ratio of a pair, as Markdown."""
    lines = [
        "| temperature | α on held-out text | α along the target's samples |",
        "| --- | ---: | ---: |",
    ]
    for temperature, alpha in report.alpha_text.items():
        lines.append(f"| {temperature:g} | {alpha:.3f} | {report.alpha_samples[temperature]:.3f} |")
    lines.append("")
    lines.append(
        f"Cost ratio c = {report.cost_ratio:.3f}: a single-token step of the draft takes "
        f"{report.draft_seconds * 1e3:.2f} ms, of the target {report.target_seconds * 1e3:.2f} ms "
        "(transformers, eager, bf16, batch 1, medians)."
    )
    return "\n".join(lines)


def _size(split: Mapping[str, int]) -> str:
    return f"{split['files']:,} files, {split['bytes']:,} bytes, {split['tokens']:,} tokens"


def model_card(
    title: str,
    summary: str,
    facts: Mapping[str, str],
    report: PairReport,
    manifest: Mapping[str, Any],
    command: str,
) -> str:
    """The README.md of a model folder.

    Args:
        title: heading.
        summary: what the model is for.
        facts: name and value of each row of the table of numbers.
        report: the measured pair.
        manifest: of the corpus, from ``write_tokens``.
        command: that reproduces the model.
    """
    splits = manifest["splits"]
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""{_HEADER}
# {title}

{summary}

## Numbers

| | |
| --- | --- |
{table}

## The pair

α is the mean over positions of Σ min(p, q), p the target and q the draft, both at that temperature;
at temperature 0 it is the share of positions where their most likely tokens agree. The samples
continue 64 tokens of held-out files by 128 tokens.

{pair_table(report)}

## Data

Python source of the standard library and of installed, permissively licensed packages; tests,
generated files, tables and duplicates are left out, and a large package is cut to a sample.

- for training: {_size(splits["train"])}
- held out, by hash: {_size(splits["val"])}

{corpus_table(manifest)}

## Reproduce

```
{command}
```

## Limits

A small model for demonstrations and tests of speculative decoding. Its output looks like Python but
has no use as code. It may repeat passages of its training data, which stay under the licences
listed above.
"""
