"""Draws the figure of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.lab.plots import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    SKY,
    canvas,
    require_matplotlib,
    save,
)
from recipes.reproduce.page import marked

_COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, BLACK, SKY)
_MARKERS = "osD^vXP"
_SIZE = (6.4, 4.2)


def draw(figure: Mapping[str, Any], file: Path, lossy: Iterable[str] = ()) -> None:
    """Draws lines with markers; lines differ in colour and marker.

    Args:
        figure: see :class:`recipes.reproduce.recipe.Figure`.
        file: an SVG file.
        lossy: names of lines that the legend marks as lossy.

    Raises:
        MissingPlotsError: matplotlib is not installed.
    """
    require_matplotlib()
    with canvas(_SIZE) as drawing:
        axes = drawing.subplots()
        for number, (name, points) in enumerate(figure["lines"].items()):
            style = number % len(_COLOURS)
            xs, ys = zip(*points, strict=True)
            marker = _MARKERS[style] if len(points) < 30 else None
            axes.plot(xs, ys, color=_COLOURS[style], marker=marker, lw=2, label=marked(name, lossy))
        axes.set_title(figure["title"], fontsize=13)
        axes.set_xlabel(figure["x"])
        axes.set_ylabel(figure["y"])
        axes.grid(alpha=0.25, lw=0.6)
        if len(figure["lines"]) > 1:
            axes.legend(frameon=False)
        save(drawing, file, "recipes.reproduce")
