"""Options that choose the decoding method and the length of drafts."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from outrider.cli.errors import fail
from outrider.methods import catalogue

SPECULATION = "Speculation"
AUTO = "auto"
AUTO_REPEATABLE = "auto-repeatable"
FIXED = "fixed"


def complete_methods() -> list[tuple[str, str]]:
    """Names and summaries of the methods, for completion in the shell."""
    return [(entry.name, entry.summary) for entry in catalogue.entries().values()]


def _complete_lengths() -> list[str]:
    return ["fixed", "heuristic", "confidence:0.4", "survival:0.3"]


Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The decoding method; `outrider methods` lists them. 'plain' runs the target alone. "
        "'auto' takes whatever pays, round by round: copies of earlier tokens, the draft model or "
        "head, or nothing. Default: the head's own, where --draft is a head, else 'speculative'.",
        autocompletion=complete_methods,
        rich_help_panel=SPECULATION,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="An option of the method, such as budget=0.2 for 'mentored'; `outrider methods` "
        "lists them. May be repeated.",
        rich_help_panel=SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="γ: maximum number of draft tokens per round, 1 to 64; for a tree, of levels. "
        "Default: a tree's own depth, else 5.",
        rich_help_panel=SPECULATION,
    ),
]


def _parse_tokens(text: str) -> Any:
    """A number, or a word for lengths that are chosen by measurement."""
    if text in (AUTO, AUTO_REPEATABLE, FIXED):
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a valid integer, nor 'auto', 'auto-repeatable' or 'fixed'"
        ) from None


NumSpeculativeTokensOrAuto = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        metavar="N|auto|auto-repeatable|fixed",
        parser=_parse_tokens,
        help="γ: maximum number of draft tokens per round, 1 to 64; for a tree, of levels. 'auto' "
        "chooses the number round by round, 0 included, by measured times and acceptance; the "
        "output of a seed then depends on the machine's speed, except at temperature 0 and with "
        "method 'coupled'. 'auto-repeatable' does so unless a sampled output has a seed, which "
        "then has one output. 'fixed' is a tree's own depth, else 5. Default: 'auto-repeatable' "
        "for lossless methods that draft chains, else 'fixed'.",
        rich_help_panel=SPECULATION,
    ),
]
DraftConfidence = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Stop drafting after a token to which the draft gives a probability below P; 0 is "
        "off.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="fixed; heuristic or heuristic:START, which adapts the length to the tokens accepted, "
        "up to --num-speculative-tokens (20 if not set); confidence:C, as --draft-confidence; "
        "survival:THETA, which stops once the joint probability of the draft tokens is below "
        "1 - THETA; table:[[FIRST, LAST, N], ...], a length by the number of running requests.",
        autocompletion=_complete_lengths,
        rich_help_panel=SPECULATION,
    ),
]


@dataclass(frozen=True)
class Speculation:
    """The decoding method and its drafts."""

    method: Method = None
    option: Options = None
    num_speculative_tokens: NumSpeculativeTokensOrAuto = None
    draft_confidence: DraftConfidence = 0.0
    draft_length: DraftLength = "fixed"

    @property
    def with_fixed_length(self) -> "Speculation":
        """The same, of fixed length where the user chose none."""
        if self.num_speculative_tokens is not None:
            return self
        fixed: Any = FIXED
        return replace(self, num_speculative_tokens=fixed)

    @property
    def options(self) -> dict[str, str]:
        """``["budget=0.2"]`` as a mapping; the method parses the values, which are strings here."""
        values: dict[str, str] = {}
        for item in self.option or ():
            name, equals, value = item.partition("=")
            if not (name and equals and value):
                raise fail(f"--option {item!r}: write NAME=VALUE, such as budget=0.2")
            values[name.strip().replace("-", "_")] = value.strip()
        return values
