"""Colours of the charts and the page, light and dark.

Charts are drawn in the light colours, which are also those of exported files. In the page each
colour becomes a CSS variable, so that one drawing serves both modes. The series colours are those
of Okabe and Ito, which colour-blind readers can distinguish, lightened for the dark mode; series
also differ in their markers and dashes.
"""

import re
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour in both modes."""

    light: str
    dark: str


COLOURS = {
    "paper": Colour("#ffffff", "#14171b"),
    "ink": Colour("#1b1f24", "#e4e7eb"),
    "muted": Colour("#68707a", "#98a1ab"),
    "grid": Colour("#d8dce1", "#353c44"),
    "blue": Colour("#0072b2", "#5aaee4"),
    "vermilion": Colour("#d55e00", "#f2894a"),
    "green": Colour("#009e73", "#3fc49b"),
    "ochre": Colour("#a67c00", "#dcb53c"),
    "pink": Colour("#b8578f", "#e29ac5"),
    "sky": Colour("#3a96cc", "#92d1f6"),
}
PAPER, INK, MUTED, GRID = (COLOURS[name].light for name in ("paper", "ink", "muted", "grid"))
BLUE, VERMILION = COLOURS["blue"].light, COLOURS["vermilion"].light
SERIES = tuple(
    COLOURS[name].light for name in ("blue", "vermilion", "green", "ochre", "pink", "sky", "ink")
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)))

_FONT = '"DejaVu Sans", Verdana, sans-serif'  # Verdana has the same widths
_NAMES = {colour.light: name for name, colour in COLOURS.items()}


def variables(mode: str) -> str:
    """The colours of one mode, ``light`` or ``dark``, as CSS declarations."""
    return " ".join(f"--{name}: {getattr(each, mode)};" for name, each in COLOURS.items())


def inline(svg: str, prefix: str, label: str) -> str:
    """An SVG file of matplotlib as an element of an HTML page.

    Args:
        svg: the file's content.
        prefix: makes the ids unique on the page.
        label: what the chart shows, for screen readers; plain text without quotes or brackets.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = svg.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    svg = re.sub(r"#[0-9a-f]{6}\b", _variable, svg)
    svg = svg.replace("'DejaVu Sans'", _FONT.replace('"', "'"))
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML knows both; no address is left
    svg = svg.replace("xlink:href", "href")
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'


def _variable(match: re.Match[str]) -> str:
    name = _NAMES.get(match[0])
    return match[0] if name is None else f"var(--{name})"
