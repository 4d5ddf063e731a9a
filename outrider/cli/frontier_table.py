"""Formats the document of ``outrider frontier`` as tables of at most 80 columns."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.lab.plots import x_axis

_AT = (0.01, 0.03, 0.1, 0.3)
_SYMBOLS = {"kl": "KL", "tv": "TV"}
_NAMES = {"kl": "KL(target‖output)", "tv": "total variation"}


def show(document: Mapping[str, Any]) -> None:
    """Prints the tables."""
    console = Console(highlight=False)
    about = document["about"]
    console.print(
        f"target {about['target']}, draft {about['draft']}, temperature "
        f"{about['temperature']:g}, {about['positions']} positions",
        markup=False,
    )
    console.print(_plane(document["plane"]["lines"]))
    console.print(_verdict(document["plane"]["envelope"]), soft_wrap=False)
    if document["generations"]:
        console.print()
        console.print(_generations(document["generations"]))
        console.print(
            "Speed-up: over plain decoding in the same repeat; median and range over repeats. KL: "
            "KL(target‖output), measured during generation, in nats per token. Perplexity: under "
            "the target; mean over outputs, with its standard error for these prompts.",
            style="dim",
        )


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def _plane(lines: Sequence[Mapping[str, Any]]) -> Table:
    table, x_name = _table(), x_axis(lines)
    symbol = _SYMBOLS[x_name]
    table.add_column("rule", style="bold", no_wrap=True)
    table.add_column("varied", no_wrap=True)
    for x in _AT:
        table.add_column(f"{symbol} {x:g}", justify="right", no_wrap=True)
    for line in lines:
        points = [(float(p[x_name]), p["acceptance"]) for p in line["points"]]
        if not line["parameter"]:
            table.add_row(line["name"], "", *[f"{points[0][1]:.3f}"] * len(_AT), style="dim")
            continue
        values = [p["value"] for p in line["points"]]
        varied = f"{line['parameter']} {values[0]:g} … {values[-1]:g}"
        table.add_row(line["name"], varied, *[_cell(_between(points, x)) for x in _AT])
    table.caption = f"Share of drafted tokens accepted, by mean {_NAMES[x_name]} per token."
    table.caption_style = "dim"
    return table


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The highest acceptance at divergence x, interpolated linearly between a rule's points."""
    found = []
    for (low, first), (high, second) in pairwise(points):
        if math.isfinite(low + high) and min(low, high) <= x <= max(low, high):
            share = (x - low) / (high - low) if high != low else 1.0
            found.append(first + share * (second - first))
    return max(found) if found else None


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _verdict(envelope: Mapping[str, Any]) -> str:
    number = sum(envelope["comparisons"].values())
    excess = {name: float(value) for name, value in envelope["worst_excess"].items()}
    worst = max(excess, key=lambda name: math.inf if math.isnan(excess[name]) else excess[name])
    if envelope["holds"]:
        return (
            f"[bold]Mentored decoding is the upper envelope[/] at every position: {number:,} "
            f"comparisons at equal divergence, largest excess {excess[worst]:.1g}."
        )
    if excess[worst] <= envelope["tolerance"]:
        return (
            f"[bold red]Mentored decoding falls short of its own envelope[/] by "
            f"{envelope['shortfall']:.2g}."
        )
    return (
        f"[bold red]Mentored decoding is NOT the upper envelope[/]: "
        f"{envelope['worst_rule'][worst]} accepts {excess[worst]:.2g} more at a position, at equal "
        f"{worst}."
    )


def _generations(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table()
    table.add_column("setting", style="bold", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right", no_wrap=True)
    table.add_column("range", justify="right", no_wrap=True)
    table.add_column("length", justify="right", no_wrap=True)
    table.add_column("KL", justify="right", no_wrap=True)
    table.add_column("perplexity", justify="right", no_wrap=True)
    for row in rows:
        speed, stats, perplexity = row["speedup"], row["stats"], row["perplexity"]
        kl = "0" if row["lossless"] else f"{float(stats['kl_per_token']):.3f}"
        if not row["lossless"] and not stats["measured"]:
            kl = "?"
        table.add_row(
            row["name"],
            f"{row['tokens_per_second']['median']:.0f}",
            f"{speed['median']:.2f}×",
            f"{speed['lowest']:.2f}–{speed['highest']:.2f}",
            f"{stats['acceptance_length']:.2f}",
            kl,
            f"{perplexity['macro']:.2f} ± {float(perplexity['error']):.2f}",
        )
    return table
