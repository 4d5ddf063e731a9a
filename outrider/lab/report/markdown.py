"""The tables of a report in Markdown: methods by data sets, for each temperature and batch size."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outrider.lab.cell_view import CellView, checked
from outrider.lab.markdown import markdown_table
from outrider.lab.report.environment import UNKNOWN, environments
from outrider.lab.whole_file import write_whole

T = TypeVar("T")

SPEED = "tokens per second"
NUMBERS: dict[str, Callable[[CellView], float | None]] = {
    SPEED: lambda cell: cell.tokens_per_second.value,
    "tokens per round": lambda cell: cell.acceptance_length,
    "accepted per round": lambda cell: sum(cell.accepted_at) / cell.rounds,
    "acceptance rate": lambda cell: cell.acceptance_rate,
    "α": lambda cell: cell.alpha,
}
"""Numbers of a cell by name; those of metrics, such as ``perplexity macro``, are known as well."""

LEGEND = (
    "Tokens per second, as multiples of plain decoding (95 % interval over repeats and prompts); "
    "tokens per target pass. ~: another run may differ by more than 5 %."
)


def write_markdown(cells: Iterable[Any], path: Path, title: str = "Benchmark") -> None:
    """Writes one Markdown file: speeds, every number of the metrics, and the environment.

    Arguments and errors as of :func:`outrider.lab.report.write.write_report`.
    """
    views = checked(cells)
    lossy = any(not each.lossless for each in views)
    words = " Lossy: the output does not have the target's distribution." if lossy else ""
    metrics = dict.fromkeys(name for each in views for name in each.metrics)
    lines = [f"# {title}", "", f"{LEGEND}{words}", *setting_tables(views, [*metrics])]
    for environment in environments(views):
        lines += ["", "## Environment", ""]
        lines += markdown_table(("", ""), environment["rows"], left=2)
    write_whole(path, "\n".join(lines) + "\n")


def setting_tables(views: Sequence[CellView], numbers: Sequence[str] = ()) -> list[str]:
    """A section for each temperature and batch size: the speeds, and a table for each number.

    Args:
        views: the cells.
        numbers: names in ``NUMBERS`` or of metrics.
    """
    lines: list[str] = []
    for temperature, batch_size in _unique(map(_place, views)):
        part = [each for each in views if _place(each) == (temperature, batch_size)]
        lines += ["", f"## Temperature {temperature:g}, batch {batch_size}", ""]
        lines += method_table(part, written_speed)
        for name in numbers:
            lines += ["", f"{name[0].upper()}{name[1:]}:", ""]
            lines += method_table(part, _writer(name))
    return lines


def method_table(views: Sequence[CellView], write: Callable[[CellView], str]) -> list[str]:
    """Methods by data sets.

    Args:
        views: cells of one temperature and batch size.
        write: the text of a cell.
    """
    names = _unique(each.data for each in views)
    texts = {(_method(each, views), each.data): write(each) for each in views}
    rows = [
        [method, *(texts.get((method, name), "") for name in names)]
        for method in _unique(method for method, _ in texts)
    ]
    return markdown_table(("", *names), rows)


def written_speed(cell: CellView) -> str:
    """The speed-up with its interval and the tokens per round; tokens per second of the baseline,
    and of cells whose baseline failed."""
    if not cell.measured:
        return f"failed: {cell.error}"
    if cell.is_baseline or cell.speedup is None:
        return f"{cell.tokens_per_second.value:.0f}/s"
    ratio = cell.speedup
    mark = "" if cell.steady else "~"
    interval = f" ({ratio.low:.2f}–{ratio.high:.2f})"
    return f"{mark}{ratio.value:.2f}×{interval}, {cell.acceptance_length:.1f}"


def number_of(cell: CellView, name: str) -> float | None:
    """A number of a cell: one of ``NUMBERS``, or that of a metric. None where the cell failed or
    has no such number."""
    if not cell.measured:
        return None
    return NUMBERS[name](cell) if name in NUMBERS else cell.metrics.get(name)


def _writer(name: str) -> Callable[[CellView], str]:
    def write(cell: CellView) -> str:
        number = number_of(cell, name)
        return UNKNOWN if number is None else f"{number:.3g}"

    return write


def _method(cell: CellView, views: Sequence[CellView]) -> str:
    """The method with its draft length and, where several are compared, its draft."""
    drafts = {each.draft for each in views} - {None}
    draft = f", draft {cell.draft}" if len(drafts) > 1 and cell.draft is not None else ""
    gamma = "" if cell.gamma is None else f", γ {cell.gamma}"
    name = cell.title + draft + ("" if gamma in cell.title else gamma)
    return name if cell.lossless else f"{name} (lossy)"


def _place(cell: CellView) -> tuple[float, int]:
    return cell.temperature, cell.batch_size


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
