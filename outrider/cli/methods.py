"""``outrider methods``: lists the values of ``--method``."""

from collections.abc import Iterator
from typing import Annotated

import typer

from outrider.methods import catalogue


def methods(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead of a table.")
    ] = False,
) -> None:
    """List the decoding methods with their sources, guarantees and options.

    The same list for programs:

      outrider methods --json

    Lossless: the output has exactly the target's distribution. Lossy: the output distribution may
    differ from the target's, in return for speed.
    """
    if as_json:
        typer.echo(catalogue.FILE.read_text(encoding="utf-8"), nl=False)
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, leading=1)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("output", no_wrap=True)
    table.add_column("description; source; guarantee if lossy; options", overflow="fold")
    for entry in catalogue.entries().values():
        output = "lossless" if entry.lossless else "lossy"
        table.add_row(entry.name, output, "\n".join(_lines(entry)))
    Console(highlight=False).print(table)


def _lines(entry: catalogue.Entry) -> Iterator[str]:
    """Summary, source, the guarantee of a lossy method, and the options with their defaults."""
    yield entry.summary + ("" if entry.needs_draft else " Needs no draft model.")
    yield entry.paper
    if not entry.lossless:
        yield f"guarantee: {entry.bound['words']}"
    if entry.options:
        defaults = (f"{name}={option['default']}" for name, option in entry.options.items())
        yield "options: " + ", ".join(defaults)
