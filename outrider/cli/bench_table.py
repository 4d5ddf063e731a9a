"""Prints the results of a benchmark as tables of at most 80 columns, one per setting."""

import math
from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench import CellResult
from outrider.lab.bench.measuring_share import MOST
from outrider.lab.cell_view import COUNTS, metric_label
from outrider.lab.energy.per_token import joules_per_token
from outrider.lab.quality.compare import compare_cells

LOSSY = "lossy"
UNKNOWN = "–"
WIDTH = 80


def show(results: Sequence[CellResult]) -> None:
    """Prints the tables."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    if not results:
        return
    console.print(_about(results[0]), markup=False)
    for setting, group in groupby(results, key=lambda result: result.cell.setting):
        cells = list(group)
        console.print()
        console.print(_heading(setting, cells), style="bold", markup=False)
        console.print(_speeds(cells))
        if any(result.metrics or _energy(result) for result in cells):
            console.print()
            console.print(_metrics(cells))
    console.print()
    console.print(_legend(results), style="dim", markup=False)
    for result in results:
        if result.error:
            console.print(f"failed: {result.cell}: {result.error}", style="red", markup=False)
        for meter, each in joules_per_token(result.repeats).items():
            for error in dict.fromkeys(each.errors):
                text = f"no energy by {meter}: {result.cell}: {error}"
                console.print(text, style="red", markup=False)


def _about(result: CellResult) -> str:
    about = result.environment
    versions = about["versions"]
    commit = f" ({about['commit']})" if about.get("commit") else ""
    return (
        f"target {about['plan']['target']}, {about['dtype']} on {about['hardware']}, threads: "
        f"{about['threads']}, compile {about['plan']['compile']}; outrider "
        f"{versions['outrider']}{commit}, torch {versions['torch']}"
    )


def _heading(setting: tuple[float, str, int], cells: Sequence[CellResult]) -> str:
    temperature, data, batch_size = setting
    number = cells[0].data["examples"]
    return f"{data} ({number} prompts), temperature {temperature:g}, batch {batch_size}"


def _speeds(cells: Sequence[CellResult]) -> Table:
    table = _table()
    table.add_column("method", overflow="fold", ratio=1)
    for head in ("γ", "tokens/s", "speed-up", "95 %", "tokens/round", "α"):
        table.add_column(head, justify="right", no_wrap=True)
    for result in cells:
        table.add_row(_name(result, cells), _gamma(result), *_numbers(result))
    return table


def _numbers(result: CellResult) -> list[str]:
    if result.error or not result.speed:
        return ["failed", "", "", "", ""]
    speed = result.speed
    alpha = UNKNOWN if speed["alpha"] is None else f"{speed['alpha']:.2f}"
    ratio, interval = "", ""
    if result.speedup is not None:
        mark = "" if result.speedup["steady"] else "~"
        ratio = f"{mark}{result.speedup['ratio']:.2f}×"
        low, high = result.speedup["low"], result.speedup["high"]
        interval = f"{low:.2f}–{high:.2f}" if low < high else ""  # one measurement has none
    rate = speed["tokens_per_second"]["mean"]
    return [f"{rate:.1f}", ratio, interval, f"{speed['acceptance_length']:.2f}", alpha]


def _name(result: CellResult, cells: Sequence[CellResult]) -> str:
    """The method, with its draft where several are compared, and marked where it is lossy."""
    drafts = {each.cell.draft for each in cells} - {None}
    name = result.cell.title
    if len(drafts) > 1 and result.cell.draft is not None:
        name += f", draft {result.cell.draft}"
    return name if result.lossless else f"{name} ({LOSSY})"


def _gamma(result: CellResult) -> str:
    return "" if result.cell.gamma is None else str(result.cell.gamma)


def _metrics(cells: Sequence[CellResult]) -> Table:
    """Below each method a row per number, since a few of them beside each other would not fit."""
    table = _table()
    table.add_column("metric", overflow="fold", ratio=1)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("difference to the baseline", justify="right", no_wrap=True)
    baseline = next((each for each in cells if each.cell.is_baseline), None)
    for result in cells:
        rows = [*_flat(result, baseline), *_energy(result)]
        if rows:
            gamma = _gamma(result)
            table.add_row(f"{_name(result, cells)}{gamma and f', γ {gamma}'}", "", "", style="bold")
        for metric, value, difference in rows:
            table.add_row(f"  {metric}", value, difference)
    return table


def _flat(result: CellResult, baseline: CellResult | None) -> list[tuple[str, str, str]]:
    """The numbers of all metrics, by name, each with its difference to the baseline's; how much a
    metric saw, and what is no single number, is left to cells.jsonl. A lossy rule on whole paths
    has no distribution per token to compare with the target's, so that its divergence is not known.
    """
    found = []
    for metric, values in result.metrics.items():
        known = result.lossless or values.get("measured_tokens") != 0
        compared = _differences(result, baseline, metric) if known else {}
        for name, value in values.items():
            if isinstance(value, int | float) and name not in COUNTS:
                written = f"{value:.4g}" if known and math.isfinite(value) else UNKNOWN
                found.append((metric_label(metric, name), written, compared.pop(name, "")))
        found += [(metric_label(metric, name), "", text) for name, text in compared.items()]
    return found


def _differences(result: CellResult, baseline: CellResult | None, metric: str) -> dict[str, str]:
    """How the values of single outputs differ from the baseline's, with the 95 % interval."""
    if baseline is None or result.cell.is_baseline or metric not in baseline.metrics:
        return {}
    found = {}
    for name in result.metrics[metric].get("each", {}):
        try:
            each = compare_cells(result, baseline, metric, name)
        except InvalidParameterError:  # no output of either has a value
            continue
        mark = "*" if each.is_significant else " "
        found[name] = f"{each.value:+.3g} ({each.low:.3g} to {each.high:.3g}){mark}"
    return found


def _energy(result: CellResult) -> list[tuple[str, str, str]]:
    """Joules per token by each meter, marked where they are an estimate."""
    found = []
    for name, each in joules_per_token(result.repeats).items():
        label = f"{name}, joules/token" + (" (estimate)" if each.estimate else "")
        if each.joules is None:
            found.append((label, "failed", ""))
            continue
        found.append((label, f"{each.joules:.4g}", ""))
        if each.above_idle is not None and not each.estimate:
            found.append((f"{label} above idle", f"{each.above_idle:.4g}", ""))
    return found


def _legend(results: Sequence[CellResult]) -> str:
    text = (
        "speed-up: ratio of tokens per second to the baseline, with its bootstrap interval over "
        "repeats and prompts. tokens/round: tokens per target pass. α: mean overlap of draft and "
        "target distributions."
    )
    if any(not result.lossless for result in results):
        text += f" {LOSSY}: the output does not have the target's distribution."
    if any(result.metrics for result in results):
        text += (
            " difference: mean over outputs, with its paired bootstrap interval over prompts; *: "
            "the interval leaves out 0."
        )
    if any(result.speed.get("measuring_share", 0.0) > MOST for result in results):
        text += (
            f" Measuring took more than {MOST:.0%} of the time of some cells: their rounds are "
            "too short for this machine's clock."
        )
    if any(result.speedup and not result.speedup["steady"] for result in results):
        text += " ~: another run may differ by more than 5 %."
    return text


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
