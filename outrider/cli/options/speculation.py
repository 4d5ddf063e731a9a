"""How to draft and verify."""

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.cli.errors import fail
from outrider.methods import catalogue

SPECULATION = "Speculation"


def _complete_methods() -> list[tuple[str, str]]:
    """Names of methods and what they do, for the shell."""
    return [(entry.name, entry.summary) for entry in catalogue.entries().values()]


def _complete_lengths() -> list[str]:
    return ["fixed", "heuristic", "confidence:0.4", "survival:0.3"]


Method = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="How to decode; `outrider methods` lists the names. 'plain' is the target alone.",
        autocompletion=_complete_methods,
        rich_help_panel=SPECULATION,
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="A parameter of the method, such as budget=0.2 for 'mentored'; `outrider methods` "
        "lists them. May be repeated.",
        rich_help_panel=SPECULATION,
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="γ: most tokens to draft before the target checks them, 1 to 64; of a tree, its most "
        "levels. Default: a tree's own depth, else 5.",
        rich_help_panel=SPECULATION,
    ),
]
DraftConfidence = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Stop drafting after a token the draft gave less than this probability; 0 never.",
        rich_help_panel=SPECULATION,
    ),
]
DraftLength = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="fixed; heuristic or heuristic:START, which follows what was accepted, up to "
        "--num-speculative-tokens (20 if not set); confidence:C, as --draft-confidence; "
        "survival:THETA, which stops once the drafted tokens are less than 1 - THETA probable.",
        autocompletion=_complete_lengths,
        rich_help_panel=SPECULATION,
    ),
]


@dataclass(frozen=True)
class Speculation:
    """A method and its drafts."""

    method: Method = "speculative"
    option: Options = None
    num_speculative_tokens: NumSpeculativeTokens = None
    draft_confidence: DraftConfidence = 0.0
    draft_length: DraftLength = "fixed"

    @property
    def options(self) -> dict[str, str]:
        """``["budget=0.2"]`` as a mapping; values stay text, which the method reads."""
        values: dict[str, str] = {}
        for item in self.option or ():
            name, equals, value = item.partition("=")
            if not (name and equals and value):
                raise fail(f"--option {item!r}: write NAME=VALUE, such as budget=0.2")
            values[name.strip().replace("-", "_")] = value.strip()
        return values
