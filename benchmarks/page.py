"""What the results pages of all benchmarks have in common: the run, tables and bars."""

import argparse
import json
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from outrider.lab.metadata import hardware

RESULTS = Path("benchmarks/results")
Bar = tuple[str, str, bool]
"""A bar, the measured value, and whether it is met."""


def parser(doc: str | None, threads: int | None = 2) -> argparse.ArgumentParser:
    """A benchmark's command line, with ``--out`` and, unless it has none, ``--threads``.

    Args:
        doc: the module's docstring; its first line describes the command.
        threads: default number of threads.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if threads is not None:
        made.add_argument("--threads", type=int, default=threads)
    made.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return made


def about(command: str, **settings: Any) -> dict[str, Any]:
    """When, where and with what a report is measured, and the command that reproduces it."""
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": command,
        **settings,
    }


def header(title: str, where: dict[str, Any], settings: str = "", level: int = 1) -> list[str]:
    """The lines above a page's first table."""
    threads = where["threads"]
    torch_version = where["torch"] if "torch" in where else where["versions"]["torch"]
    text = (
        f"{where['date']}, {where['hardware']}, {threads} thread{'' if threads == 1 else 's'}, "
        f"torch {torch_version}"
    )
    return [
        f"{'#' * level} {title}",
        "",
        f"{text}; {settings}" if settings else f"{text}.",
        "",
        f"Command: `{where['command']}`",
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """A Markdown table after an empty line; the first ``left`` columns are aligned to the left."""
    aligned = ["---" if column < left else "---:" for column in range(len(heads))]
    lines = ["", f"| {' | '.join(heads)} |", f"|{'|'.join(aligned)}|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def bars_table(found: Iterable[Bar], measured: str = "measured") -> list[str]:
    """The table of the bars."""
    return [
        *("", f"| bar | {measured} | met |", "|---|---:|---|"),
        *(f"| {text} | {value} | {'yes' if met else 'no'} |" for text, value, met in found),
    ]


def publish(out: Path, name: str, report: Any, page: str) -> None:
    """Writes a report as JSON and as a page, and prints the page."""
    write(out, name, report, page)
    print(page)


def write(out: Path, name: str, report: Any, page: str) -> None:
    """Writes a report as JSON and as a page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(page, encoding="utf-8")
