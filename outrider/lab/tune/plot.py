"""The answer as a figure: speed-up by draft length at each batch size, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.lab.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, YELLOW, canvas, save
from outrider.lab.tune.answer import Answer, Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (
    (BLUE, "o"),
    (RED, "s"),
    (GREEN, "^"),
    (PINK, "D"),
    (ORANGE, "v"),
    (SKY, "P"),
    (YELLOW, "X"),
)
_WIDTH, _HEIGHT = 4.2, 4.6  # inches of the axes of a batch size


def draw(answer: Answer, title: str, file: Path) -> None:
    """Draws the speed-up over plain decoding of every configuration. Lines are predictions, marks
    with intervals are measurements; the choice has a ring around it.

    Args:
        answer: of a tuning.
        title: of the figure.
        file: the ``.svg`` or ``.png`` to write.
    """
    sizes = list(answer.best)
    with canvas((max(7.0, _WIDTH * len(sizes)), _HEIGHT)) as figure:
        row = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
        for axes, size in zip(row, sizes, strict=True):
            here = [e for e in answer.estimates if e.configuration.batch_size == size]
            _batch_size(axes, here, answer.best[size])
            axes.set_title(f"batch {size}", fontsize=13)
        row[0].set_ylabel("speed-up over plain decoding")
        figure.suptitle(title, fontsize=12)
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        save(figure, file, "outrider tune")


def _batch_size(axes: Axes, estimates: Sequence[Estimate], best: Estimate) -> None:
    drafting = [each for each in estimates if not each.configuration.is_plain]
    names = list(dict.fromkeys(each.configuration.source.name for each in drafting))
    for number, name in enumerate(names):
        colour, marker = _STYLES[number % len(_STYLES)]
        mine = [each for each in drafting if each.configuration.source.name == name]
        lengths = [each.configuration.length for each in mine]
        lone = marker if len(mine) == 1 else ""
        ratios = [each.predicted_ratio for each in mine]
        axes.plot(lengths, ratios, color=colour, lw=1.8, marker=lone, label=name)
        for each in mine:
            if each.ratio is not None and each.low is not None and each.high is not None:
                ends = [[each.ratio - each.low], [each.high - each.ratio]]
                at = [each.configuration.length], [each.ratio]
                axes.errorbar(*at, yerr=ends, color=colour, marker=marker, capsize=3)
    axes.axhline(1, color=GREY, lw=1.2, ls=(0, (2, 2)))
    if not best.configuration.is_plain:
        at = [best.configuration.length], [best.best_ratio]
        axes.plot(*at, marker="o", ms=17, mfc="none", mec=GREY, ls="none")
    axes.set_xlabel("draft tokens")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.grid(alpha=0.25, lw=0.6)


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True)
