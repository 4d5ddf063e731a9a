"""Formats the document of ``outrider analyse``."""

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

_LABELS = {
    "alpha": "α",
    "dependence": "dependence between positions",
    "c": "c (draft passes)",
    "beta": "β (verifying pass)",
    "overhead": "overhead",
}


def show(document: Mapping[str, Any], file: IO[str] | None = None) -> None:
    """Prints the tables, to standard output unless a file is given."""
    console = Console(highlight=False, file=file)
    if "values" in document:
        for name, text in _values(document["values"]):
            console.print(f"{name:<34}{text}", markup=False, soft_wrap=True)
    for setting, cells in _by_setting(document.get("cells", [])).items():
        console.print(setting, style="bold", markup=False)
        for table in (_factors(cells), _estimates(cells), _ratios(cells)):
            console.print(table)
            console.print()
        for each in cells:
            console.print(_verdict(each), markup=False, soft_wrap=True)


def _by_setting(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for each in cells:
        setting = (
            f"{each['data']}, temperature {each['temperature']:g}, batch size {each['batch_size']}"
        )
        found.setdefault(setting, []).append(each)
    return found


def _values(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if "gamma" in found:
        break_even = found["break_even_alpha"]
        rows = [
            ("α", f"{found['alpha']:.4g}"),
            (
                "expected tokens per round",
                f"{found['expected_tokens']:.4g} (standard deviation "
                f"{found['token_deviation']:.3g})",
            ),
            ("speed-up", f"{found['speedup']:.4g}×"),
            ("α from which it pays", "none" if break_even is None else f"{break_even:.4g}"),
            ("β up to which it pays", f"{found['largest_beta']:.4g}"),
            (
                f"rounds for {found['tokens']} tokens",
                f"{found['rounds']:.4g} (standard deviation {found['round_deviation']:.3g}, "
                f"{found['round_deviation'] / found['rounds']:.1%})",
            ),
        ]
        if found["acceptance_rate"] is not None:
            rows.insert(2, ("acceptance rate", f"{found['acceptance_rate']:.4g}"))
        if "operations_factor" in found:
            rows.append(("arithmetic operations", f"{found['operations_factor']:.4g}×"))
    best = found["optimal_gamma"]
    what = f"{best}, speed-up {found['optimal_speedup']:.4g}×" if best else "0: drafts do not pay"
    if best and not found["c"]:
        what = "unbounded, since drafts cost nothing at c = 0"
    return [*rows, (f"optimal γ, if β is always {found['beta']:g}", what)]


def _factors(cells: Sequence[Mapping[str, Any]]) -> Table:
    names = ("measured", "formula", "α", "E", "tokens", "c", "β", "overhead")
    table = _table("speed-up", *names)
    for each in cells:
        factors = each["factors"]
        table.add_row(
            _name(each),
            f"{each['speedup']:.2f}×",
            f"{factors['predicted']:.2f}×",
            f"{factors['alpha']:.2f}",
            f"{factors['tokens'] / factors['dependence']:.2f}",
            f"{factors['tokens']:.2f}",
            f"{factors['c']:.3f}",
            f"{factors['beta']:.2f}",
            f"{factors['overhead']:.2f}",
        )
    return table


def _estimates(cells: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("estimates of α", "Σ min(p, q)", "accepted/verified", "accepted/drafted")
    for each in cells:
        counted = each["accepted_of_verified"]
        table.add_row(
            _name(each),
            f"{each['factors']['alpha']:.3f}",
            f"{counted['value']:.3f} ± {counted['error']:.3f}",
            f"{each['acceptance_rate']:.3f}",
        )
    return table


def _ratios(cells: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("costs", "reference", "α", "dependence", "c", "β", "overhead", "prefill")
    for each in cells:
        table.add_row(
            _name(each),
            f"{each['reference']['speedup']:.2f}×",
            *(f"×{each['ratios'][name]:.2f}" for name in _LABELS),
            f"×{each['prefill']:.2f}",
        )
    return table


def _verdict(each: Mapping[str, Any]) -> str:
    """Which factor costs most, and what the speed-up would be without that cost."""
    largest = each["largest"]
    if largest is None:
        return f"{_name(each)}: no factor falls short of the reference."
    without = each["if_ideal"].get(largest)
    hope = "" if without is None else f"; with an ideal one the rounds would reach {without:.2f}×"
    return (
        f"{_name(each)}: most is lost to {_LABELS[largest]}, a factor of "
        f"{each['ratios'][largest]:.2f}{hope}."
    )


def _name(each: Mapping[str, Any]) -> str:
    length = "" if each["gamma"] is None else f", γ {each['gamma']}"
    return f"{each['method']}{length}{'' if each['lossless'] else ' (lossy)'}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=16)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
