"""What the results pages of all benchmarks have in common: the run, tables and bars."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.lab.markdown import markdown_table
from outrider.lab.metadata import run_metadata

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
    return run_metadata(command=command, **settings)


def version(package: str, where: Mapping[str, Any]) -> str:
    """The version of a package in a report; those of older runs have no mapping of versions."""
    return str(where.get("versions", where)[package])


def header(title: str, where: Mapping[str, Any], settings: str = "", level: int = 1) -> list[str]:
    """The lines above a page's first table."""
    threads = where["threads"]
    text = (
        f"{where['date']}, {where['hardware']}, {threads} thread{'' if threads == 1 else 's'}, "
        f"torch {version('torch', where)}"
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
    return ["", *markdown_table(heads, rows, left)]


def bars_table(found: Iterable[Bar], measured: str = "measured") -> list[str]:
    """The table of the bars."""
    rows = ((text, value, "yes" if met else "no") for text, value, met in found)
    return table(("bar", measured, "met"), rows)


def publish(out: Path, name: str, report: Any, page: str) -> None:
    """Writes a report as JSON and as a page, and prints the page."""
    write(out, name, report, page)
    print(page)


def write(out: Path, name: str, report: Any, page: str) -> None:
    """Writes a report as JSON and as a page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(page, encoding="utf-8")
