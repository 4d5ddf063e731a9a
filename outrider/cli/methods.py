"""``outrider methods``: what ``--method`` may be."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.quiet import silence

if TYPE_CHECKING:
    from outrider.methods import Method


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
                "bound": asdict(method.recipe().verifier.bound),
                "needs": method.needs,
                "greedy_only": method.recipe().greedy_only,
                "options": {
                    option.name: {"default": option.plain, "choices": list(option.choices)}
                    for option in method.options.values()
                },
            }
            for method in METHODS.values()
        ]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, leading=1)
    table.add_column("method", style="bold", no_wrap=True)
    table.add_column("law", no_wrap=True)
    table.add_column("what it does; where it was published; its options", overflow="fold")
    for method in METHODS.values():
        table.add_row(
            method.name,
            "lossless" if method.lossless else "lossy",
            "\n".join(_lines(method)),
        )
    Console(highlight=False).print(table)


def _lines(method: "Method") -> Iterator[str]:
    """Summary and source; for a lossy rule what it keeps to; the options with their defaults."""
    yield method.summary + ("" if method.needs_draft else " Needs no draft model.")
    yield method.paper
    if not method.lossless:
        yield f"keeps: {method.recipe().verifier.bound.words}"
    if method.options:
        yield "options: " + ", ".join(f"{o.name}={o.default}" for o in method.options.values())
