"""A text with each token marked by its origin: by colour, or by signs where there is none.

Legend of origins: *accepted*, a drafted token the target kept; *correction*, the target's own after
one it refused; *bonus*, the target's own after it kept all; *plain*, nothing was drafted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

if TYPE_CHECKING:
    from outrider.engine import Engine, Event

STYLES = {
    "accepted": Style.parse("green"),
    "correction": Style.parse("bold white on red"),
    "bonus": Style.parse("bold white on blue"),
    "plain": Style.parse("default"),
}
SIGNS = {"correction": "~", "bonus": "+", "plain": "="}
LABELS = {
    "accepted": "accepted draft",
    "correction": "correction",
    "bonus": "bonus",
    "plain": "nothing drafted",
}


def has_colour(console: Console) -> bool:
    """Whether origins can be shown by colour: a capable terminal, and NO_COLOR not set."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Segments:
    """What the marks mean, in one line."""
    if has_colour(console):
        parts = [Segment("trace: ")]
        for origin, label in LABELS.items():
            parts += [Segment(label, STYLES[origin]), Segment("  ")]
        return Segments([*parts[:-1], Segment.line()])
    marked = [f"[{SIGNS[o]}{label}]" if o in SIGNS else label for o, label in LABELS.items()]
    return Segments([Segment("trace: " + "  ".join(marked)), Segment.line()])


@dataclass
class Painter:
    """Splits the text of events into tokens and marks them.

    An event's text belongs to a whole round, and may be held back while a stop string or a
    character is incomplete; so tokens are decoded on the side and waiting pieces used up by length.

    Args:
        engine: for its tokenizer.
        prompt_ids: what the text continues.
        colour: by styles, else by signs.
    """

    engine: "Engine"
    prompt_ids: tuple[int, ...]
    colour: bool
    _waiting: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        from outrider.engine.detokenize import Detokenizer

        tokenizer = self.engine.target.tokenizer
        assert tokenizer is not None
        self._detokenizer = Detokenizer(tokenizer, self.prompt_ids)

    def paint(self, event: "Event") -> Segments:
        """The event's text, marked."""
        segments: list[Segment] = []
        for piece, origin in self.pieces(event):
            segments += _marked(piece, origin, self.colour)
        return Segments(segments)

    def pieces(self, event: "Event") -> Iterator[tuple[str, str]]:
        """The event's text by token, each with its origin."""
        for token, origin in zip(event.token_ids, event.origins, strict=True):
            self._waiting.append((self._detokenizer.push([token]), origin))
        text = event.text
        while text and self._waiting:
            piece, source = self._waiting.pop(0)
            if len(piece) > len(text):
                self._waiting.insert(0, (piece[len(text) :], source))
            if piece:
                yield text[: len(piece)], source
            text = text[len(piece) :]
        if text:  # the replacement of a character that never became complete
            yield text, event.origins[-1] if event.origins else "plain"


def _marked(piece: str, origin: str, colour: bool) -> list[Segment]:
    """One token. A line break of the target's own gets a sign, or nobody would see it."""
    sign = SIGNS.get(origin)
    style = STYLES[origin]
    segments: list[Segment] = []
    for line in piece.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        broken = len(body) < len(line)
        if sign is None or (colour and origin == "plain"):
            shown = body
        elif colour:
            shown = body + "↵" * broken
        else:
            shown = "[" + sign + body + r"\n" * broken + "]"
        segments.append(Segment(shown, style if colour else None))
        if broken:
            segments.append(Segment("\n"))
    return segments
