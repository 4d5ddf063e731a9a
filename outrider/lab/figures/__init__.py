"""Figures drawn from formulas and from measured cells."""

from outrider.lab.figures.leviathan import FIGURES, draw_figure

__all__ = ["FIGURES", "draw_figure"]
