"""``outrider methods``: what ``--method`` may be."""

from collections.abc import Iterator
from typing import Annotated

import typer

from outrider.methods import catalogue


def methods(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead of a table.")
    ] = False,
) -> None:
    """List the decoding methods: where each was published, what it needs, what it promises.

    For a program to read:

      outrider methods --json

    Lossless: the text has exactly the target's distribution, as if the target had written it alone.
    Lossy: it may differ, in return for speed.
    """
    if as_json:
        typer.echo(catalogue.FILE.read_text(encoding="utf-8"), nl=False)
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, leading=1)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("distribution", no_wrap=True)
    table.add_column("what it does; where it was published; its options", overflow="fold")
    for entry in catalogue.entries().values():
        promise = "lossless" if entry.lossless else "lossy"
        table.add_row(entry.name, promise, "\n".join(_lines(entry)))
    Console(highlight=False).print(table)


def _lines(entry: catalogue.Entry) -> Iterator[str]:
    """Summary and source; for a lossy rule what it keeps to; the options with their defaults."""
    yield entry.summary + ("" if entry.needs_draft else " Needs no draft model.")
    yield entry.paper
    if not entry.lossless:
        yield f"keeps: {entry.bound['words']}"
    if entry.options:
        defaults = (f"{name}={option['default']}" for name, option in entry.options.items())
        yield "options: " + ", ".join(defaults)
