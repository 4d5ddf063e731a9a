"""The charts of the cells that share data set, temperature and batch size."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from outrider.lab.analysis.acceptance import alpha_by_position
from outrider.lab.analysis.pareto import pareto_front
from outrider.lab.cell_view import CellView, Interval, Percentiles, is_lower_better
from outrider.lab.report.chart import (
    FONT_SIZE,
    Chart,
    legend_below,
    light_grid,
    one_axes,
    parts,
    reference_line,
    series_style,
)
from outrider.lab.report.theme import BLUE, INK, MUTED, PAPER, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.62  # inches that a bar and the name above it take
_RANGE = 0.45
_LEGEND = 0.2  # inches per line of a legend
_HATCH = "////"
LOSSY_NOTE = "Lossy methods are hatched."
HOLLOW_NOTE = "Markers of lossy methods are hollow."


def charts_of(views: Sequence[CellView]) -> Iterator[Chart]:
    """All charts for which the cells have data.

    Args:
        views: measured cells of one setting, at least one.
    """
    yield speed_chart(views)
    yield from _acceptance_charts([each for each in views if each.verified_at])
    yield from _quality_charts(views)
    yield from _latency_charts(views)
    yield from _energy_charts(views)


def speed_chart(views: Sequence[CellView]) -> Chart:
    """Speed-ups with their intervals; tokens per second where there is no baseline."""
    relative = all(each.speedup is not None for each in views)
    order = sorted(views, key=lambda each: _speed(each, relative).value)
    title = "Speed-up over plain decoding" if relative else "Tokens per second"
    whiskers = "95 % bootstrap intervals" if relative else "from the slowest to the fastest repeat"
    lossy = f" {LOSSY_NOTE}" if any(not each.lossless for each in views) else ""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for y, each in enumerate(order):
            _bar(axes, y, each, _speed(each, relative), "×" if relative else "")
        if relative:
            reference_line(axes, x=1)
        axes.set_xlim(0, 1.22 * max(_speed(each, relative).high for each in order))
        axes.set_ylim(-0.45, len(order) - 0.15)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("speed-up [×]" if relative else "tokens per second")

    height = 0.6 + _BAR * len(order)
    return Chart("speed", title, f"Lines are {whiskers}.{lossy}", height, draw)


def _speed(each: CellView, relative: bool) -> Interval:
    if relative:
        assert each.speedup is not None
        return each.speedup
    return each.tokens_per_second


def _bar(axes: "Axes", y: float, each: CellView, speed: Interval, unit: str) -> None:
    colour = MUTED if each.is_baseline else BLUE if each.lossless else VERMILION
    style = {"color": colour} if each.lossless else {"fc": PAPER, "ec": colour, "hatch": _HATCH}
    axes.barh(y, speed.value, 0.42, **style)  # type: ignore[arg-type]
    if speed.low < speed.high:
        axes.plot([speed.low, speed.high], [y, y], color=INK, lw=1.6, solid_capstyle="butt")
    beneath = {"facecolor": PAPER, "linewidth": 0, "pad": 0.5}  # hides the line at 1
    axes.text(0, y + 0.27, each.name, va="bottom", fontsize=FONT_SIZE - 0.5, bbox=beneath)
    axes.annotate(
        f"{speed.value:.2f}{unit}" if unit else f"{speed.value:.1f}",
        (max(speed.high, speed.value), y),
        (4, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_SIZE - 0.5,
        fontweight="bold",
    )


def _acceptance_charts(views: Sequence[CellView]) -> Iterator[Chart]:
    groups = parts(views)
    for number, group in enumerate(groups, 1):
        yield _acceptance_chart(group, number, len(groups))


def _acceptance_chart(views: Sequence[CellView], number: int, total: int) -> Chart:
    def draw(figure: "Figure") -> None:
        axes = one_axes(figure)
        width = 0.5 / len(views)
        for i, each in enumerate(views):
            limits = alpha_by_position(each.accepted_at, each.verified_at)
            x = [1 + n + (i - (len(views) - 1) / 2) * width for n in range(len(limits))]
            y = [share for share, _, _ in limits]
            below = [share - low for share, low, _ in limits]
            above = [high - share for share, _, high in limits]
            style = series_style(i, each.lossless)
            axes.errorbar(x, y, [below, above], lw=1.4, elinewidth=1, label=each.name, **style)  # type: ignore[arg-type]
        axes.set_ylim(0, 1.03)
        deepest = max(len(each.verified_at) for each in views)
        axes.set_xticks(range(1, deepest + 1, 1 + deepest // 12))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted of verified tokens")
        legend_below(figure, axes)

    return Chart(
        f"acceptance{_suffix(number, total)}",
        f"Acceptance by position{_of(number, total)}",
        "Of the tokens verified at each position of the draft, the share that was accepted, with "
        "95 % Wilson intervals. In a tree, the position is the depth.",
        3.2 + _LEGEND * len(views),
        draw,
    )


def _quality_charts(views: Sequence[CellView]) -> Iterator[Chart]:
    names = dict.fromkeys(name for each in views for name in each.charted)
    for name in names:
        shown = [each for each in views if name in each.metrics and each.speedup is not None]
        if len(shown) > 1:
            yield from _scatter_charts(
                f"quality-{_slug(name)}",
                f"Quality against speed: {name}",
                shown,
                partial(_metric, name),
                _speedup_value,
                name,
                "speed-up [×]",
                x_lower=is_lower_better(name),
            )


def _energy_charts(views: Sequence[CellView]) -> Iterator[Chart]:
    meters = dict.fromkeys(name for each in views for name in each.energy)
    for meter in meters:
        shown = [each for each in views if meter in each.energy]
        if shown:
            estimate = any(each.energy[meter].estimate for each in shown)
            yield from _scatter_charts(
                f"energy-{_slug(meter)}",
                f"Energy against speed: {meter}{' (estimate)' if estimate else ''}",
                shown,
                partial(_joules, meter),
                lambda each: each.tokens_per_second.value,
                f"joules per token{' (estimate)' if estimate else ''}",
                "tokens per second",
                x_lower=True,
            )


def _metric(name: str, each: CellView) -> float:
    return each.metrics[name]


def _joules(meter: str, each: CellView) -> float:
    return each.energy[meter].joules


def _speedup_value(each: CellView) -> float:
    assert each.speedup is not None
    return each.speedup.value


def _scatter_charts(
    name: str,
    title: str,
    views: Sequence[CellView],
    x_of: Callable[[CellView], float],
    y_of: Callable[[CellView], float],
    x_label: str,
    y_label: str,
    *,
    x_lower: bool,
) -> Iterator[Chart]:
    """Charts of points with their Pareto front, which is that of all points in each of them."""
    points = [(x_of(each), y_of(each)) for each in views]
    front = [points[i] for i in pareto_front(points, x_lower=x_lower)]
    groups = parts(list(zip(views, points, strict=True)))
    for number, group in enumerate(groups, 1):

        def draw(
            figure: "Figure", group: Sequence[tuple[CellView, tuple[float, float]]] = group
        ) -> None:
            axes = one_axes(figure)
            _staircase(axes, front, x_lower)
            axes.plot(*zip(*points, strict=True), ls="", marker=".", color=MUTED, ms=4)
            for i, (each, (x, y)) in enumerate(group):
                axes.plot(x, y, ls="", label=each.name, **series_style(i, each.lossless))  # type: ignore[arg-type]
            axes.margins(0.12)
            better = "← better" if x_lower else "better →"
            axes.set_xlabel(f"{x_label}  ({better})")
            axes.set_ylabel(y_label)
            legend_below(figure, axes)

        lossy = f" {HOLLOW_NOTE}" if any(not each.lossless for each in views) else ""
        dots = " Small dots are the methods of the other charts." if len(groups) > 1 else ""
        yield Chart(
            f"{name}{_suffix(number, len(groups))}",
            f"{title}{_of(number, len(groups))}",
            f"The line is the Pareto front: no method is better in both.{lossy}{dots}",
            3.2 + _LEGEND * len(group),
            draw,
        )


def _staircase(axes: "Axes", front: Sequence[tuple[float, float]], x_lower: bool) -> None:
    """The Pareto front as steps along which one coordinate gets worse at a time."""
    x, y = zip(*front, strict=True)
    axes.step(x, y, where="post" if x_lower else "pre", color=MUTED, lw=1.2, zorder=1)


def _latency_charts(views: Sequence[CellView]) -> Iterator[Chart]:
    shown = [each for each in views if each.inter_token or each.first_token]
    if not shown:
        return
    order = shown[::-1]

    def draw(figure: "Figure") -> None:
        upper, lower = figure.subplots(2, 1)
        _ranges(upper, [(each, each.first_token) for each in order])
        upper.set_xlabel("time to the first token [ms]")
        _ranges(lower, [(each, each.inter_token) for each in order])
        lower.set_xlabel("inter-token latency [ms]")

    yield Chart(
        "latency",
        "Latency",
        "Dot: median. Thick line: to the 90th percentile; thin line: to the 99th. Tokens of one "
        "round arrive together; the time since the round before is divided among them.",
        1.2 + 2 * _RANGE * len(order),
        draw,
    )


def _ranges(axes: "Axes", rows: Sequence[tuple[CellView, Percentiles | None]]) -> None:
    light_grid(axes)
    axes.grid(axis="y", visible=False)
    for y, (each, times) in enumerate(rows):
        axes.text(
            0.005, y + 0.2, each.name, va="bottom", fontsize=FONT_SIZE - 1.5,
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        if times is None:
            continue
        colour = MUTED if each.is_baseline else BLUE if each.lossless else VERMILION
        p50, p90, p99 = (1e3 * seconds for seconds in (times.p50, times.p90, times.p99))
        axes.plot([p50, p99], [y, y], color=colour, lw=1.2)
        axes.plot([p50, p90], [y, y], color=colour, lw=4, solid_capstyle="butt")
        face = colour if each.lossless else PAPER
        axes.plot(p50, y, marker="o", ms=7, color=colour, mfc=face, mew=1.5)
    axes.set_yticks([])
    axes.set_ylim(-0.5, len(rows) - 0.2)
    axes.set_xlim(left=0)
    axes.spines["left"].set_visible(False)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in name.lower()).strip("-")


def _suffix(number: int, total: int) -> str:
    return f"-{number}" if total > 1 else ""


def _of(number: int, total: int) -> str:
    return f" ({number} of {total})" if total > 1 else ""


def nice_number(value: float | None, digits: int = 2) -> str:
    """A number for a table; an en dash for None and for what is not finite."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
