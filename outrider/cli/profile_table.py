"""Formats the document of ``outrider profile`` as tables of at most 80 columns."""

from collections.abc import Mapping
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

_MIB = 2**20


def show(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Prints the tables, to standard output unless a file is given."""
    console = Console(highlight=False, width=min(80, Console().width), file=file)

    def say(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=False)

    say(_heading(document))
    say()
    console.print(_phases(document))
    say(_outside(document))
    say()
    say(_memory(document["memory"]))
    console.print(_floors(document["models"]))
    if any(f["cached"] for model in document["models"].values() for f in model["floors"].values()):
        say("* fits into the last-level cache: the floor uses that cache's measured bandwidth.")
    say()
    console.print(_beta(document["models"]))
    for line in _speedup(document):
        say(line)


def _heading(document: Mapping[str, Any]) -> str:
    about, run = document["about"], document["run"]
    draft = "" if about["draft"] is None else f", draft {about['draft']}"
    how = {"off": "eager"}.get(about["compile"], f"compile {about['compile']}")
    weights = [
        f", {role} in {about[f'quantize_{role}']}"
        for role in ("target", "draft")
        if about[f"quantize_{role}"]
    ]
    return (
        f"{run['method']} (γ {run['num_speculative_tokens']}), temperature {run['temperature']:g}, "
        f"target {about['target']}{draft}\n"
        f"{about['hardware']}, {about['threads']} threads, {about['dtype']}, {how}"
        f"{''.join(weights)}, torch {about['versions']['torch']}\n"
        f"{run['rounds']} rounds, {run['tokens']} tokens after a prompt of "
        f"{run['prompt_tokens']}; {run['acceptance_length']:.2f} tokens per round, "
        f"α {run['alpha']:.2f}"
    )


def _phases(document: Mapping[str, Any]) -> Table:
    phases, table = document["phases"], _table("a round", "ms", "share", "passes", "tokens each")
    whole, passes = phases["seconds"], phases["passes"]
    for group, seconds in phases["groups"].items():
        table.add_row(group, _ms(seconds), f"{seconds / whole:.1%}", "", "", style="bold")
        for row in phases["phases"]:
            if row["group"] != group or row["seconds"] == 0:
                continue
            own = [p for track, p in passes.items() if track.startswith(group)]
            counted = ["", ""]
            if row["phase"] in ("pass", "passes") and own:
                count = sum(p["count"] for p in own)
                tokens = sum(p["count"] * p["tokens"] for p in own) / count
                counted = [f"{count:.1f}", f"{tokens:.1f}"]
            share = f"{row['seconds'] / whole:.1%}"
            table.add_row(f"  {row['phase']}", _ms(row["seconds"]), share, *counted)
    table.add_row("total", _ms(whole), "100.0%", "", "", style="bold")
    return table


def _outside(document: Mapping[str, Any]) -> str:
    phases, cost = document["phases"], document["profiler"]
    return (
        f"Outside the models' passes: {phases['outside_passes']:.1%} of a round. Recording costs "
        f"{1e6 * cost['span_seconds']:.1f} µs per span, {cost['spans_share']:.2%} of a round; "
        f"recorded rounds took {cost['recorded_over_unrecorded']:.2f}× the time of unrecorded ones."
    )


def _memory(memory: Mapping[str, Any]) -> str:
    size = memory["last_level_cache"]
    cache = "of unknown size" if size is None else f"{size / _MIB:.0f} MiB"
    return (
        f"Memory: {_gb(memory['median'])} GB/s ({_gb(memory['lowest'])} to "
        f"{_gb(memory['highest'])}), measured by a sum over {memory['num_bytes'] / _MIB:.0f} MiB; "
        f"a matrix-vector product reads {_gb(memory['matrix_vector'])} GB/s. Last-level cache: "
        f"{cache}."
    )


def _floors(models: Mapping[str, Any]) -> Table:
    table = _table("floor of a pass", "weights MB", "KV MB", "floor ms", "pass ms", "reached")
    for track, model in models.items():
        for where, name in (("alone", "1 token, alone"), ("round", "in rounds")):
            if where in model["floors"]:
                least = model["floors"][where]
                table.add_row(
                    f"{track}, {name}",
                    f"{least['weights'] / 1e6:.1f}",
                    f"{least['keys_values'] / 1e6:.1f}",
                    _ms(least["seconds"]) + ("*" if least["cached"] else " "),
                    _ms(least["pass"]),
                    f"{least['reached']:.0%}",
                )
    return table


def _beta(models: Mapping[str, Any]) -> Table:
    widths = list(dict.fromkeys(n for model in models.values() for n in model["beta"]))
    table = _table("tokens", *widths)
    for track, model in models.items():
        ms = {n: 1e3 * seconds for n, seconds in model["pass_seconds"].items()}
        table.add_row(f"{track} ms", *(_short(ms.get(n)) for n in widths))
        table.add_row("  β", *(_short(model["beta"].get(n)) for n in widths))
    return table


def _speedup(document: Mapping[str, Any]) -> list[str]:
    found, run = document["speedup"], document["run"]
    lines = [""]
    if found is None:
        return [*lines, f"{run['tokens_per_second']:.1f} tokens per second."]
    lines.append(
        f"Speed-up over plain decoding: {found['measured']:.2f}× ({found['lowest']:.2f} to "
        f"{found['highest']:.2f}); {run['tokens_per_second']:.1f} and "
        f"{run['plain_tokens_per_second']:.1f} tok/s"
    )
    costs = f"cγ {found['draft']:.2f} (c {found['c']:.2f}), β {found['beta']:.2f}"
    lines.append(f"Formula E / (cγ + β), {costs}:")
    for name, tokens, key in (
        ("E from α, i.i.d.", found["expected_tokens"], "by_alpha"),
        ("E as measured", found["tokens"], "by_tokens"),
    ):
        if found[key] is not None:
            lines.append(
                f"  {name:<16} {tokens:.2f} tokens: {found[key]:.2f}×; measured / formula "
                f"{found[f'reached_{key}']:.2f}"
            )
    return lines


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _short(number: float | None) -> str:
    """The number with at least three digits; at most four characters if below ten thousand."""
    if number is None:
        return ""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _gb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f}"
