"""``outrider methods``: what ``--method`` may be."""

import json
from typing import Annotated

import typer

from outrider.cli.quiet import silence


def methods(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead of a table.")
    ] = False,
) -> None:
    """List the decoding methods: where each was published, what it needs, what it promises.

    For a program to read:

      outrider methods --json

    Lossless: the text has exactly the target's law, as if the target had written it alone. Lossy:
    it may differ, in return for speed.
    """
    silence()
    from outrider.methods import METHODS

    if as_json:
        rows = [
            {
                "name": method.name,
                "summary": method.summary,
                "paper": method.paper,
                "lossless": method.lossless,
                "needs": method.needs,
                "greedy_only": method.recipe().greedy_only,
            }
            for method in METHODS.values()
        ]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("law of the text", no_wrap=True)
    table.add_column("needs", no_wrap=True)
    table.add_column("what it does; where it was published", overflow="fold")
    for method in METHODS.values():
        table.add_row(
            method.name,
            "lossless" if method.lossless else "lossy",
            method.needs,
            f"{method.summary}\n{method.paper}",
        )
    Console(highlight=False).print(table)
