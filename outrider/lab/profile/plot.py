"""The β curve as a figure: pass times against tokens per pass, with their floors."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.lab.plots import BLUE, GREEN, GREY, PINK, RED, canvas, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (10.0, 4.6)
_STYLES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"))
_DASHED = (0, (2, 2))


def draw(document: Mapping[str, Any], file: Path) -> None:
    """Draws the pass times and the β curve of every model.

    Args:
        document: of ``outrider profile``.
        file: the ``.svg`` or ``.png`` to write.
    """
    with canvas(_SIZE) as figure:
        times, ratios = figure.subplots(1, 2)
        for (track, model), style in zip(document["models"].items(), _STYLES, strict=False):
            seconds = {n: 1e3 * s for n, s in model["pass_seconds"].items()}
            _line(times, seconds, track, *style)
            _line(ratios, model["beta"], track, *style)
            floor = model["floors"]["alone"]
            by = "cache" if floor["cached"] else "memory"
            label = f"{track}, floor by {by}"
            times.axhline(1e3 * floor["seconds"], color=style[0], lw=1.2, ls=_DASHED, label=label)
        ratios.axhline(1, color=GREY, lw=1.2, ls=_DASHED)
        times.set_yscale("log")
        times.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ratios.set_ylim(bottom=0)
        _describe(times, "milliseconds", "Time of a pass")
        _describe(ratios, "β: time relative to one token", "The β curve")
        figure.suptitle(_title(document), fontsize=12)
        handles, labels = times.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        save(figure, file, "outrider profile")


def _line(axes: "Axes", numbers: Mapping[str, float], label: str, colour: str, marker: str) -> None:
    widths = [int(n) for n in numbers]
    axes.plot(widths, list(numbers.values()), color=colour, marker=marker, lw=2, label=label)


def _describe(axes: "Axes", y_label: str, title: str) -> None:
    axes.set_xlabel("tokens in the pass")
    axes.set_ylabel(y_label)
    axes.set_title(title, fontsize=13)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25, lw=0.6)


def _title(document: Mapping[str, Any]) -> str:
    about = document["about"]
    names = [Path(name).name for name in (about["target"], about["draft"]) if name is not None]
    return (
        f"{' and '.join(dict.fromkeys(names))}; {about['hardware']}, {about['threads']} threads, "
        f"{about['dtype']}"
    )
