"""Options that choose the prompt and what is printed."""

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = "Output"

PromptArgument = Annotated[
    str | None,
    typer.Argument(metavar="PROMPT", help="The text to continue; '-' reads it from stdin."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Read the prompt from this file, unchanged.",
    ),
]
Chat = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Answer this message of a user instead, by the model's chat template; '-' reads it "
        "from stdin.",
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The system prompt: what the model is told beforehand."),
]
NoSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--no-special-tokens",
        help="Encode PROMPT with add_special_tokens=False: without the tokens, such as a "
        "beginning-of-sequence token, that the tokenizer adds to a text.",
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Colour each token by its origin: accepted draft, correction, bonus.",
        rich_help_panel=OUTPUT,
    ),
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also run plain decoding on the same prompt; print both speeds and the speed-up.",
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
        help="With --json: also report the N most probable tokens at each position.",
        rich_help_panel=OUTPUT,
    ),
]
