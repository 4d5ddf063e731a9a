"""Formats a plan for the terminal."""

from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from outrider.lab.plan import Option, Plan


def show(
    found: "Plan", simulated: Mapping[str, Mapping[str, Any]], file: IO[str] | None = None
) -> None:
    """Prints the plan, to standard output unless a file is given."""
    console = Console(highlight=False, file=file)
    for line in _answer(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(_options(found))
    if simulated:
        console.print()
        console.print(_simulated(simulated))
        for line in _events(simulated):
            console.print(line, markup=False, soft_wrap=True)
    console.print("\nAssumptions", style="bold")
    for each in found.assumptions:
        console.print(f"- {each}", markup=False, soft_wrap=True)


def _answer(found: "Plan") -> list[str]:
    best = found.best
    state = best.state
    assert state is not None
    gpus = f"{best.degree} GPU{'s' if best.degree > 1 else ''} each"
    lines = [
        f"{best.replicas} replica{'s' if best.replicas > 1 else ''} on {gpus}"
        + (f" (tensor parallelism {best.degree})" if best.degree > 1 else "")
        + _drafting(best),
        f"At this load: {state.rows:.3g} rows per replica, {1e3 * state.per_token:.3g} ms per "
        f"token, {1e3 * state.first_token:.3g} ms to the first token, {state.request:.3g} s per "
        f"request; the most it serves is {best.max_load:.4g} requests per second.",
    ]
    if best.draft_on == "none":
        return lines + _not_worth_it(found)
    plain = found.plain
    if plain.state is None:
        lines.append(f"Plain decoding serves at most {plain.max_load:.4g} requests per second.")
    else:
        lines.append(
            f"Plain decoding at this load: {1e3 * plain.state.per_token:.3g} ms per token, "
            f"{plain.state.request:.3g} s per request."
        )
    return [*lines, _stops(best)]


def _not_worth_it(found: "Plan") -> list[str]:
    """That plain decoding is faster than the draft that was asked for."""
    if found.question.draft is None:
        return []
    drafting = found.drafting
    if drafting is None:
        return ["With the draft, no option fits into memory and serves this load."]
    assert drafting.state is not None
    return [
        f"Speculation does not pay at this load: with the draft, a request takes "
        f"{drafting.state.request:.3g} s.",
        _stops(drafting),
    ]


def _drafting(option: "Option") -> str:
    if option.draft_on == "none":
        return ", plain decoding"
    where = "whole on each GPU" if option.draft_on == "each GPU" else "sharded like the target"
    return f", γ {option.gamma}, the draft {where}"


def _stops(option: "Option") -> str:
    """When speculation stops paying."""
    ranges = ", ".join(
        f"{first}–{last}: {gamma}" if last > first else f"{first}: {gamma}"
        for first, last, gamma in option.gamma_ranges
    )
    batch, load = option.replica.last_paying_batch, option.last_paying_load
    lengths = f"γ by batch size: {ranges}."
    if not batch:
        return f"{lengths} Speculation pays at no batch size."
    if load is None:
        return f"{lengths} Speculation pays up to the largest batch, {batch}."
    return (
        f"{lengths} Speculation stops paying beyond batch {batch}, at about {load:.4g} requests "
        f"per second."
    )


def _options(found: "Plan") -> Table:
    head = (
        "",
        "TP",
        "copies",
        "draft",
        "batch",
        "γ",
        "rows",
        "ms/token",
        "s",
        "max rps",
        "pays to",
    )
    table = _table(head)
    for each in found.options:
        state, batch = each.state, each.replica.last_paying_batch
        times = ["–"] * 3
        if state is not None:
            times = [
                f"{state.rows:.3g}",
                f"{1e3 * state.per_token:.3g}",
                f"{state.request:.3g}",
            ]
        table.add_row(
            "→" if each is found.best else "",
            str(each.degree),
            str(each.replicas),
            each.draft_on.replace("each GPU", "whole"),
            str(each.replica.max_batch),
            str(each.gamma),
            *times,
            f"{each.max_load:.4g}",
            "all" if each.last_paying_load is None else str(batch),
        )
    return table


def _simulated(simulated: Mapping[str, Mapping[str, Any]]) -> Table:
    head = ("simulated", "ms/token", "p99", "first token, ms", "p99", "request, s", "p99", "rows")
    table = _table(head)
    for name, each in simulated.items():
        token, first, request = each["per_token"], each["first_token"], each["request"]
        busy = each["mean_busy"] or 1.0
        table.add_row(
            name,
            *(f"{1e3 * token[key]:.3g}" for key in ("mean", "p99")),
            *(f"{1e3 * first[key]:.3g}" for key in ("mean", "p99")),
            *(f"{request[key]:.3g}" for key in ("mean", "p99")),
            f"{each['mean_rows'] / busy:.3g}",
        )
    return table


def _events(simulated: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}: {each['arrived']} requests in {each['seconds'] / 3600:.3g} h, "
        f"{each['rejected']} rejected; {each['failures']} failures restarted {each['restarted']}."
        for name, each in simulated.items()
    ]


def _table(head: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(head):
        text = number == 0 or name == "draft"
        table.add_column(name, justify="left" if text else "right")
    return table
