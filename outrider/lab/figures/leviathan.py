"""Figures 2 and 3 of Leviathan, Kalman and Matias, ICML 2023, drawn from their formulas.

Figure 2: expected tokens per round as a function of α, for several γ (equation 1).
Figure 3: the optimal γ as a function of α, for several c (section 3.5).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.speedup import optimal_gamma
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.plots import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    RED,
    canvas,
    require_matplotlib,
    save,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (6.4, 4.8)
_COLOURS = (BLUE, ORANGE, GREEN, RED, PINK, BLACK)
_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)), (0, (3, 3)))
GAMMAS = (1, 3, 5, 7, 10)
"""The γ of figure 2."""
COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The c of figure 3."""
_MOST_ALPHA = 0.95  # of figure 3; the optimal γ grows without a bound as α approaches 1


def figure_2(axes: "Axes") -> None:
    """Draws expected tokens per round against α."""
    alphas = [i / 200 for i in range(201)]
    for gamma, colour, dashes in zip(GAMMAS, _COLOURS, _DASHES, strict=False):
        tokens = [expected_tokens(alpha, gamma) for alpha in alphas]
        axes.plot(alphas, tokens, color=colour, ls=dashes, lw=2, label=f"γ = {gamma}")
    axes.set_ylabel("expected tokens per round")
    axes.set_ylim(bottom=0)


def figure_3(axes: "Axes") -> None:
    """Draws the optimal γ against α."""
    alphas = [i / 400 for i in range(1, round(400 * _MOST_ALPHA) + 1)]
    for c, colour, dashes in zip(COSTS, _COLOURS, _DASHES, strict=False):
        gammas = [optimal_gamma(alpha, c, most=80) for alpha in alphas]
        axes.step(alphas, gammas, where="mid", color=colour, ls=dashes, lw=2, label=f"c = {c:g}")
    axes.set_ylabel("optimal γ")
    axes.set_ylim(bottom=0)


_DRAWN: Mapping[str, tuple[Callable[["Axes"], None], str]] = {
    "leviathan-2": (figure_2, "Leviathan et al. (2023), figure 2"),
    "leviathan-3": (figure_3, "Leviathan et al. (2023), figure 3"),
}
FIGURES = tuple(_DRAWN)
"""Names of the figures that :func:`draw_figure` draws."""


def draw_figure(name: str, file: Path) -> None:
    """Draws a published figure from its formula.

    Args:
        name: one of ``FIGURES``.
        file: the ``.svg`` or ``.png`` to write.

    Raises:
        InvalidParameterError: there is no such figure.
        MissingPlotsError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if name not in _DRAWN:
        raise InvalidParameterError(f"figure={name!r}: must be one of {', '.join(FIGURES)}")
    require_matplotlib()
    draw, title = _DRAWN[name]
    with canvas(_SIZE) as figure:
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel("α, probability that a drafted token is accepted")
        axes.set_title(title, fontsize=13)
        axes.set_xlim(0, 1)
        axes.grid(alpha=0.25, lw=0.6)
        axes.legend(frameon=False)
        save(figure, file, "outrider analyse")
