"""Generates ``docs/cli.md`` from the commands: ``python -m outrider.cli.reference``."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from outrider.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

_HEAD = """# Command line

`python -m outrider.cli.reference` generates this page from the commands; a test checks that it is
up to date.

Only results go to standard output; summaries, notes and errors go to standard error. An error is
one line. Exit codes: 0 success; 1 a comparison failed, or an unexpected error (`OUTRIDER_DEBUG=1`
prints the stack trace); 2 bad input; 130 Ctrl-C, with the output so far printed. With `NO_COLOR`
set, signs replace colours. `outrider --install-completion` installs completion for your shell.
[json.md](json.md) describes the keys that `outrider generate --json` prints.
"""


def reference() -> str:
    """The text of the page."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="outrider")
    return "\n".join([_HEAD, *_sections(group, context)])


def _sections(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from _sections(command, inner)
        else:
            yield _section(inner.command_path, command, inner)


def _section(title: str, command: Any, context: Any) -> str:
    described = inspect.cleandoc(command.callback.__doc__ or "")
    lines = [f"## {title}", "", _with_examples(described)]
    panel: str | None = ""
    for param in command.get_params(context):
        if param.name == "help" or getattr(param, "hidden", False):
            continue
        here = getattr(param, "rich_help_panel", None)
        if here != panel:
            lines += ["", f"**{here}**", ""] if here else [""]
            panel = here
        lines.append(_entry(param, context))
    return "\n".join(lines) + "\n"


def _with_examples(text: str) -> str:
    """The text with indented paragraphs as code blocks."""
    blocks = [
        f"```\n{block.strip()}\n```" if block.startswith(" ") else block
        for block in text.split("\n\n")
    ]
    return "\n\n".join(blocks)


def _entry(param: Any, context: Any) -> str:
    if param.param_type_name == "argument":
        names = f"`{param.metavar or param.name.upper()}`"
    else:
        value = "" if param.is_flag else f" {param.metavar or param.display_type(context)}"
        spellings = [*param.opts, *param.secondary_opts]
        names = ", ".join(f"`{spelling}{value}`" for spelling in spellings)
    default = param.default
    shown = not isinstance(default, bool) and default not in (None, []) and not callable(default)
    tail = f" Default: `{getattr(default, 'value', default)}`." if shown else ""
    needed = " Required." if param.required else ""
    help_text = " ".join((param.help or "").split())
    return f"- {names}: {help_text}{tail}{needed}"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
