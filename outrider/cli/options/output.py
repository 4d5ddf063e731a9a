"""Where the prompt comes from, and what is printed."""

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = "Output"

PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue; '-' reads standard input."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Take the prompt from this file, exactly as it is.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Colour each token by where it came from: accepted draft, correction, bonus.",
        rich_help_panel=OUTPUT,
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also decode the same prompt plainly, and print both speeds and the speed-up.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document instead.", rich_help_panel=OUTPUT),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --json: also the N most probable tokens at each place.",
        rich_help_panel=OUTPUT,
    ),
]
