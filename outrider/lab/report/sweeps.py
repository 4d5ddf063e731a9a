"""Charts over several settings: speed-up by draft length and by batch size, and against theory."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from outrider.lab.cell_view import CellView
from outrider.lab.prediction import CellPrediction, predictions_of
from outrider.lab.report.chart import (
    Chart,
    legend_below,
    one_axes,
    parts,
    reference_line,
    series_style,
)
from outrider.lab.report.charts import HOLLOW_NOTE
from outrider.lab.report.theme import MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEGEND = 0.2


def sweep_charts(views: Sequence[CellView]) -> Iterator[Chart]:
    """Charts of the measured cells of all settings; none for what was not varied."""
    drafting = [each for each in views if each.gamma is not None and each.speedup is not None]
    yield from _lines(
        "gamma", "Speed-up by draft length", "draft length γ", drafting,
        lambda each: (each.title, each.draft, each.setting), lambda each: each.gamma or 0,
    )  # fmt: skip
    sped = [each for each in views if each.speedup is not None and not each.is_baseline]
    yield from _lines(
        "batch", "Speed-up by batch size", "batch size", sped,
        lambda each: (each.title, each.draft, each.gamma, each.data, each.temperature),
        lambda each: each.batch_size,
    )  # fmt: skip
    predictions = predictions_of(views)
    if predictions:
        yield prediction_chart(predictions)


def prediction_chart(predictions: Sequence[CellPrediction]) -> Chart:
    """Measured against predicted speed-up, one point per cell."""
    titles = list(dict.fromkeys(each.cell.title for each in predictions))

    def draw(figure: "Figure") -> None:
        axes = one_axes(figure)
        ends = [x for each in predictions for x in (each.factors.predicted, each.measured)]
        low, high = 0.9 * min(ends), 1.08 * max(ends)
        axes.plot([low, high], [low, high], color=MUTED, lw=1.0, ls=(0, (3, 2)), zorder=1)
        for i, title in enumerate(titles):
            mine = [each for each in predictions if each.cell.title == title]
            style = series_style(i, all(each.cell.lossless for each in mine))
            x = [each.factors.predicted for each in mine]
            lossy = "" if all(each.cell.lossless for each in mine) else " (lossy)"
            axes.plot(x, [each.measured for each in mine], ls="", label=title + lossy, **style)  # type: ignore[arg-type]
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_aspect("equal")
        axes.set_xlabel("predicted speed-up, E / (cγ + β) [×]")
        axes.set_ylabel("measured speed-up [×]")
        legend_below(figure, axes)

    lossy = f" {HOLLOW_NOTE}" if any(not each.cell.lossless for each in predictions) else ""
    return Chart(
        "prediction",
        "Measured against predicted speed-up",
        "Leviathan et al., theorem 3.8, with α, c and β as measured. A point below the line loses "
        f"to overhead or prefill; one above it accepts more than α says, as dependent positions, "
        f"trees and lossy rules do.{lossy}",
        4.6 + _LEGEND * len(titles),
        draw,
    )


def _lines(
    name: str,
    title: str,
    x_label: str,
    views: Sequence[CellView],
    key: Callable[[CellView], Hashable],
    x_of: Callable[[CellView], int],
) -> Iterator[Chart]:
    """Charts of the groups that have at least two values of x."""
    groups: dict[Hashable, list[CellView]] = defaultdict(list)
    for each in views:
        groups[key(each)].append(each)
    series = [
        (_label(group, views), sorted(group, key=x_of))
        for group in groups.values()
        if len({x_of(each) for each in group}) > 1
    ]
    runs = parts(series)
    for number, run in enumerate(runs, 1):

        def draw(figure: "Figure", run: Sequence[tuple[str, list[CellView]]] = run) -> None:
            axes = one_axes(figure)
            reference_line(axes, y=1)
            for i, (label, group) in enumerate(run):
                speeds = [each.speedup for each in group if each.speedup is not None]
                y = [speed.value for speed in speeds]
                below = [speed.value - speed.low for speed in speeds]
                above = [speed.high - speed.value for speed in speeds]
                x = [x_of(each) for each in group]
                style = series_style(i, group[0].lossless)
                axes.errorbar(x, y, [below, above], lw=1.4, elinewidth=1, label=label, **style)  # type: ignore[arg-type]
            axes.set_xticks(sorted({x_of(each) for _, group in run for each in group}))
            axes.set_ylim(bottom=0)
            axes.set_xlabel(x_label)
            axes.set_ylabel("speed-up [×]")
            legend_below(figure, axes)

        lossy = f" {HOLLOW_NOTE}" if any(not group[0].lossless for _, group in run) else ""
        of = f" ({number} of {len(runs)})" if len(runs) > 1 else ""
        yield Chart(
            f"{name}{f'-{number}' if len(runs) > 1 else ''}",
            f"{title}{of}",
            f"With 95 % bootstrap intervals.{lossy}",
            3.2 + _LEGEND * len(run),
            draw,
        )


def _label(group: Sequence[CellView], views: Sequence[CellView]) -> str:
    """What tells a series from the others: its method, and what else varies among the cells."""
    first = group[0]
    words = [first.title if first.lossless else f"{first.title} (lossy)"]
    for value, text in (
        ("draft", first.draft),
        ("data", first.data),
        ("temperature", f"T {first.temperature:g}"),
        ("batch_size", f"batch {first.batch_size}"),
        ("gamma", f"γ {first.gamma}"),
    ):
        varied = (
            len({getattr(each, value) for each in views if getattr(each, value) is not None}) > 1
        )
        fixed = len({getattr(each, value) for each in group}) == 1
        if varied and fixed and text is not None:
            words.append(text)
    return ", ".join(words)
