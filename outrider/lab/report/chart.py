"""A chart: drawn once, as an element of the page or as a file for a paper."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from outrider.lab.plots import canvas, save
from outrider.lab.report.theme import GRID, INK, MARKERS, MUTED, PAPER, SERIES, inline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.2
"""Inches. At the width of a phone's screen the type of a chart is then about 11 pixels high."""
FONT_SIZE = 11
MOST_SERIES = 7
"""Series in one chart of lines or points; more are spread over several charts."""
_CREATOR = "outrider report"

T = TypeVar("T")


@dataclass(frozen=True)
class Chart:
    """A chart.

    Attributes:
        name: for files; lower-case letters, digits and hyphens.
        title: one line.
        note: what the reader must know to read the chart, as one or two sentences.
        height: in inches.
        draw: draws into an empty figure.
    """

    name: str
    title: str
    note: str
    height: float
    draw: Callable[["Figure"], None]

    def svg(self, prefix: str) -> str:
        """The chart as an element of an HTML page, in the colours of the page's mode.

        Args:
            prefix: makes ids unique on the page.
        """
        buffer = io.StringIO()
        with canvas((WIDTH, self.height), font_size=FONT_SIZE, ink=INK) as figure:
            self.draw(figure)
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        return inline(buffer.getvalue(), prefix, self.title)

    def save(self, file: Path) -> None:
        """Writes the chart with its title as PNG or SVG."""
        with canvas((WIDTH, self.height + 0.3), font_size=FONT_SIZE, ink=INK) as figure:
            self.draw(figure)
            figure.suptitle(self.title, fontsize=FONT_SIZE + 1)
            save(figure, file, _CREATOR)


def one_axes(figure: "Figure") -> "Axes":
    """The only axes of a figure, with a light grid."""
    axes = figure.subplots()
    light_grid(axes)
    return axes


def light_grid(axes: "Axes") -> None:
    """A grid behind the data."""
    axes.grid(color=GRID, lw=0.7)
    axes.set_axisbelow(True)


def legend_below(figure: "Figure", axes: "Axes") -> None:
    """A legend of one column below the axes, which a narrow screen has room for."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", frameon=False, fontsize=FONT_SIZE - 1.5
    )


def series_style(index: int, lossless: bool) -> dict[str, object]:
    """Colour and marker of a series; the marker of a lossy method is hollow."""
    colour = SERIES[index % len(SERIES)]
    return {
        "color": colour,
        "marker": MARKERS[index % len(MARKERS)],
        "mfc": colour if lossless else PAPER,
        "mec": colour,
        "mew": 1.5,
        "ms": 6.5,
    }


def reference_line(axes: "Axes", *, x: float | None = None, y: float | None = None) -> None:
    """A dashed line at a value to compare with."""
    style = {"color": MUTED, "lw": 1.0, "ls": (0, (3, 2)), "zorder": 1}
    if x is not None:
        axes.axvline(x, **style)  # type: ignore[arg-type]
    if y is not None:
        axes.axhline(y, **style)  # type: ignore[arg-type]


def parts(items: Sequence[T], most: int = MOST_SERIES) -> list[Sequence[T]]:
    """The items in runs of nearly equal length, none longer than ``most``."""
    number = -(-len(items) // most)
    size = -(-len(items) // number) if number else 1
    return [items[i : i + size] for i in range(0, len(items), size)]
