"""Prints what ``outrider tune`` found: the answer, acceptance, predicted against measured speed."""

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.lab.tune.answer import Estimate
from outrider.lab.tune.tuning import Tuning

WIDTH = 80
_PREDICTED = 3  # rows per batch size that were not measured


def show(tuning: Tuning) -> None:
    """Prints the answer first."""
    assert tuning.answer is not None
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    console.print(tuning.answer.words(), style="bold", markup=False)
    console.print()
    console.print(_sources(tuning))
    console.print()
    console.print(_configurations(tuning))
    console.print()
    console.print(
        f"{tuning.seconds:.0f} of {60 * tuning.settings.minutes:.0f} s. Ratios are to plain "
        f"decoding in the same repeats, with intervals of 95 %. c is the time that a drafted token "
        f"adds to a round, over that of a plain step.",
        style="dim",
        markup=False,
    )
    for name, quality in tuning.qualities.items():
        console.print(f"quality of {name}: {quality}", style="dim", markup=False)
    for name, error in tuning.errors.items():
        console.print(f"not measured: {name}: {error}", style="red", markup=False)
    if tuning.left_out:
        console.print(
            f"no time for: {'; '.join(dict.fromkeys(tuning.left_out))}", style="dim", markup=False
        )


def _sources(tuning: Tuning) -> Table:
    """Acceptance by position and cost of each source."""
    table = _table("source", "accepted at positions 1, 2, …", "drafted", "c")
    for source in tuning.sources:
        acceptance = tuning.acceptance.get(source.name)
        if acceptance is None:
            continue
        positions = acceptance.by_position(source.longest)
        shares = " ".join("-" if each is None else f"{each[0]:.2f}" for each in positions)
        size = min(tuning.rests[source.name].measured_rows)
        drafted = acceptance.drafted(source.longest)
        table.add_row(source.name, shares, f"{drafted:.1f}", f"{tuning.c(source, size):.3f}")
    return table


def _configurations(tuning: Tuning) -> Table:
    """Predicted against measured speed."""
    assert tuning.answer is not None
    table = _table("batch", "source", "tokens", "predicted", "measured", "ratio")
    chosen = list(tuning.answer.best.values())
    for size in tuning.answer.best:
        here = [e for e in tuning.answer.estimates if e.configuration.batch_size == size]
        for each in _shown(here):
            mark = "*" if each in chosen else ""
            configuration = each.configuration
            table.add_row(
                str(size),
                configuration.source.name,
                "" if configuration.is_plain else str(configuration.length),
                f"{each.predicted:.1f}",
                "" if each.measured is None else f"{each.measured:.1f}",
                f"{_ratio(each)}{mark}",
            )
    return table


def _shown(estimates: list[Estimate]) -> list[Estimate]:
    """Plain decoding, what was measured, and the best of what was not."""
    plain = [each for each in estimates if each.configuration.is_plain]
    others = [each for each in estimates if not each.configuration.is_plain]
    measured = [each for each in others if each.ratio is not None]
    rest = sorted(others, key=lambda each: -each.predicted_ratio)
    rest = [] if measured else rest[:_PREDICTED]
    return [*plain, *sorted(measured, key=lambda each: -each.best_ratio), *rest]


def _ratio(each: Estimate) -> str:
    if each.configuration.is_plain:
        return "1.00"
    if each.low is None or each.high is None:
        return f"({each.predicted_ratio:.2f})"
    if each.repeats == 1:
        return f"{each.best_ratio:.2f}"
    return f"{each.best_ratio:.2f} ({each.low:.2f}-{each.high:.2f})"


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in names:
        left = name in ("source", "accepted at positions 1, 2, …")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "source")
    return table
