"""Marks each token of an output by its origin: by colour, or by signs without colours.

Origins: *accepted*, an accepted draft token; *correction*, the target's token in place of a
rejected one; *bonus*, the target's token after all draft tokens were accepted; *forced*, a token
that a grammar left no choice about; *plain*, a token of a round without a draft.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    "forced": Style.parse("cyan"),
}
SIGNS = {"correction": "~", "bonus": "+", "plain": "=", "forced": "!"}
LABELS = {
    "accepted": "accepted draft",
    "correction": "correction",
    "bonus": "bonus",
    "plain": "nothing drafted",
    "forced": "forced",
}


def has_colour(console: Console) -> bool:
    """Whether the console shows colours: a capable terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def legend(console: Console) -> Segments:
    """One line that explains the marks."""
    if has_colour(console):
        parts = [Segment("trace: ")]
        for origin, label in LABELS.items():
            parts += [Segment(label, STYLES[origin]), Segment("  ")]
        return Segments([*parts[:-1], Segment.line()])
    marked = [f"[{SIGNS[o]}{label}]" if o in SIGNS else label for o, label in LABELS.items()]
    return Segments([Segment("trace: " + "  ".join(marked)), Segment.line()])


@dataclass
class Painter:
    """Splits the text of events into tokens and marks each by its origin.

    Args:
        engine: provides the tokenizer.
        prompt_ids: the prompt's tokens.
        colour: mark tokens by colour; otherwise by signs.
    """

    engine: "Engine"
    prompt_ids: tuple[int, ...]
    colour: bool

    def __post_init__(self) -> None:
        from outrider.engine.token_texts import TokenTexts

        tokenizer = self.engine.target.tokenizer
        assert tokenizer is not None
        self._texts = TokenTexts(tokenizer, self.prompt_ids)

    def paint(self, event: "Event") -> Segments:
        """The event's text with its tokens marked."""
        segments: list[Segment] = []
        for piece, origin in self.pieces(event):
            segments += _marked(piece, origin, self.colour)
        return Segments(segments)

    def pieces(self, event: "Event") -> Iterator[tuple[str, str]]:
        """Yields the event's text token by token, each with its origin."""
        return self._texts.split(event)


def printer(
    engine: "Engine", prompt_ids: tuple[int, ...], console: Console, trace: bool
) -> "Callable[[Event], None]":
    """What prints each event on the console's file: its text, or with its tokens marked.

    Args:
        engine: provides the tokenizer.
        prompt_ids: the tokens that the output continues.
        console: the console.
        trace: whether to mark tokens.
    """

    def write(event: "Event") -> None:
        console.file.write(event.text)
        console.file.flush()

    if not trace:
        return write
    painter = Painter(engine, prompt_ids, has_colour(console))
    return lambda event: console.print(painter.paint(event), end="", soft_wrap=True)


def _marked(piece: str, origin: str, colour: bool) -> list[Segment]:
    """The segments of one token. A marked line break is shown by a sign, as it has no colour."""
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
