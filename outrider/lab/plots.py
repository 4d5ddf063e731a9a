"""Figures from the JSON documents of measurements. Only this module imports matplotlib.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish. Lines also
differ in their dashes or markers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY = "#000000", "#767676"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#B8A800"  # a darker yellow
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"

COLOURS = {
    "plain": GREY,
    "speculative": BLACK,
    "block": BLACK,
    "mentored": BLUE,
    "lenience": RED,
    "ensemble": GREEN,
    "cascade": PINK,
    "relaxed": ORANGE,
    "typical": SKY,
    "bild": YELLOW,
}
MARKERS = {
    "mentored": "os^v",
    "lenience": "v<",
    "ensemble": "D",
    "relaxed": "X",
    "typical": "P",
    "bild": "d",
    "cascade": "o>sdhp",
}
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)), (0, (3, 3)))
_SIZE = (11.0, 8.2)  # inches; the smallest type is still legible at a width of 900 pixels
_DPI = 160
_INKED = (
    "text.color",
    "axes.labelcolor",
    "axes.titlecolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
)
_MIN_DIVERGENCE = 1e-3  # smallest divergence on the axis
_AXES = {
    "kl": "KL(target‖output) per token [nats]",
    "tv": "total variation per token (KL is infinite for most)",
}


class MissingPlotsError(OutriderError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raises MissingPlotsError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingPlotsError(
            'the figure needs matplotlib, which is not installed: pip install "outrider[bench]"'
        ) from error


def frontier(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws ``frontier.svg`` and ``frontier.png`` into a folder; returns their paths.

    Args:
        document: of ``outrider frontier``.
        folder: must exist.
    """
    with canvas(_SIZE) as figure:
        _draw(document, figure)
        paths = [folder / "frontier.svg", folder / "frontier.png"]
        for path in paths:
            save(figure, path, "outrider frontier")
    return paths


@contextmanager
def canvas(
    size: tuple[float, float], *, font_size: float = 12, ink: str = BLACK
) -> Iterator["Figure"]:
    """An empty figure in the project's style. Save it inside the ``with`` block.

    Args:
        size: width and height in inches.
        font_size: in points.
        ink: colour of texts, axes and ticks.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "hatch.linewidth": 0.8,
        **dict.fromkeys(_INKED, ink),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "outrider",
        "svg.fonttype": "none",
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save(figure: "Figure", file: Path, creator: str) -> None:
    """Writes a figure as PNG or SVG, without a date so that equal figures give equal files.

    Args:
        figure: from :func:`canvas`.
        file: PNG if its name ends in ``.png``, otherwise SVG.
        creator: goes into the metadata.
    """
    if file.suffix == ".png":
        figure.savefig(file, dpi=_DPI, metadata={"Software": creator})
    else:
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": creator})


def _draw(document: Mapping[str, Any], figure: "Figure") -> None:
    generations = document["generations"]
    axes = figure.subplots(1, 2 if generations else 1, squeeze=False)[0]
    _plane(axes[0], document["plane"]["lines"])
    if generations:
        _speeds(axes[1], generations)
    about = document["about"]
    figure.suptitle(_title(about), fontsize=13)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=4,
        fontsize=11.5,
        frameon=False,
        handlelength=3.6,
    )


def _title(about: Mapping[str, Any]) -> str:
    target, draft = (_short(about[role]) for role in ("target", "draft"))
    pair = f"{target} pair" if target == draft else f"{target} with draft {draft}"
    truncated = [
        f"{name.replace('_', '-')} {about[name]:g}, "
        for name, off in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        if about.get(name, off) != off
    ]
    return (
        f"{pair}, temperature {about['temperature']:g}, {''.join(truncated)}"
        f"{about['positions']} positions\n"
        f"{about['hardware']}, {about['dtype']}, γ {about['num_speculative_tokens']}"
    )


def _short(name: str) -> str:
    """A model's name, or the last part of a long path."""
    return name if len(name) <= 30 else Path(name).name


def x_axis(lines: Sequence[Mapping[str, Any]]) -> str:
    """The divergence to show: KL, or total variation if KL is infinite for most points.

    KL is infinite for most points when the target is truncated (top-k, top-p), since most lossy
    rules then never emit some tokens that the target keeps.

    Args:
        lines: the rules of the document, each with its points.
    """
    numbers = [float(point["kl"]) for line in lines for point in line["points"]]
    return "kl" if 2 * sum(map(math.isfinite, numbers)) > len(numbers) else "tv"


def _plane(axes: "Axes", lines: Sequence[Mapping[str, Any]]) -> None:
    """Draws acceptance against divergence, one line per rule."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    seen: dict[str, int] = {}
    x_name = x_axis(lines)
    for line in lines:
        method = line["name"].split()[0]
        number = seen.setdefault(method, 0)
        seen[method] += 1
        points = [(float(p[x_name]), p["acceptance"]) for p in line["points"]]
        if not line["parameter"]:
            axes.axhline(
                points[0][1], color=BLACK, lw=1.2, ls=(0, (2, 2)), zorder=1, label=line["name"]
            )
            continue
        shown = [(x, r) for x, r in points if math.isfinite(x) and x >= _MIN_DIVERGENCE]
        missing = sum(math.isinf(x) for x, _ in points)
        note = f" ({missing} of {len(points)} infinite)" if missing else ""
        markers = MARKERS.get(method, "o")
        axes.plot(
            [x for x, _ in shown],
            [r for _, r in shown],
            color=COLOURS.get(method, GREY),
            ls=_DASHES[number % len(_DASHES)],
            marker=markers[number % len(markers)],
            ms=6,
            mec="white",
            mew=0.5,
            lw=2.6 if line["name"] == "mentored kl" else 1.4,
            zorder=3 if method == "mentored" else 2,
            label=line["name"] + note,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: ""))
    axes.set_xlabel(_AXES[x_name])
    axes.set_ylabel("probability that a drafted token is accepted")
    axes.set_title("Single positions: acceptance against divergence", fontsize=13)
    axes.grid(alpha=0.25, lw=0.6)


def _speeds(axes: "Axes", generations: Sequence[Mapping[str, Any]]) -> None:
    """Draws speed-up against perplexity, one point per setting."""
    for row in generations:
        speed, perplexity = row["speedup"], row["perplexity"]
        x, y, error = perplexity["macro"], speed["median"], float(perplexity["error"])
        colour = COLOURS.get(row["method"], GREY)
        axes.errorbar(
            x,
            y,
            xerr=error if math.isfinite(error) else None,
            yerr=[[y - speed["lowest"]], [speed["highest"] - y]],
            fmt="none",
            ecolor=colour,
            elinewidth=1.0,
            alpha=0.35,
            zorder=2,
        )
        axes.plot(
            x,
            y,
            color=colour,
            marker="o" if row["lossless"] else "s",
            mfc="white" if row["lossless"] else colour,
            mew=1.6,
            ms=7.5,
            zorder=3,
        )
    base = generations[0]  # plain decoding, the reference
    axes.axvline(base["perplexity"]["macro"], color=GREY, lw=1.2, ls=(0, (2, 2)), zorder=1)
    axes.axhline(base["speedup"]["median"], color=GREY, lw=1.2, ls=(0, (2, 2)), zorder=1)
    axes.margins(x=0.12)
    axes.set_xlabel("perplexity of the output under the target")
    axes.set_ylabel("speed-up over plain decoding [×]")
    axes.set_title("Whole outputs (○ lossless, ■ lossy)", fontsize=13)
    axes.grid(alpha=0.25, lw=0.6)
    _label(axes, generations)


def _label(axes: "Axes", generations: Sequence[Mapping[str, Any]]) -> None:
    """Writes a name beside each point, where it covers neither points nor other names."""
    from matplotlib.transforms import Bbox

    figure: Any = axes.figure
    figure.draw_without_rendering()
    points = [(row["perplexity"]["macro"], row["speedup"]["median"]) for row in generations]
    taken: list[Any] = []
    for x, y in axes.transData.transform(points):
        taken.append(Bbox.from_bounds(x - 8, y - 8, 16, 16))
    offsets = [(dx, side * dy) for dy in range(9, 90, 11) for side in (1, -1) for dx in (6, -6)]
    for row, point in zip(generations, points, strict=True):
        text = axes.annotate(
            row["name"],
            point,
            offsets[0],
            textcoords="offset points",
            va="center",
            fontsize=11,
            color=COLOURS.get(row["method"], GREY),
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            zorder=4,
        )

        def box_at(offset: tuple[int, int], text: Any = text) -> Any:
            text.set_position(offset)
            text.set_horizontalalignment("left" if offset[0] > 0 else "right")
            return text.get_window_extent()

        def cost(offset: tuple[int, int], box_at: Any = box_at) -> float:
            box = box_at(offset)
            outside = axes.bbox.x0 > box.x0 or box.x1 > axes.bbox.x1 or axes.bbox.y0 > box.y0
            hits = (Bbox.intersection(box, other) for other in taken)
            return sum(hit.width * hit.height for hit in hits if hit is not None) + 1e6 * outside

        chosen = min(offsets, key=cost)  # the first of equals, which is the nearest
        taken.append(box_at(chosen))
        if abs(chosen[1]) > offsets[0][1]:
            line = {"arrowstyle": "-", "lw": 0.7, "color": GREY, "shrinkB": 5}
            axes.annotate(
                "", point, chosen, textcoords="offset points", arrowprops=line, zorder=2.5
            )
