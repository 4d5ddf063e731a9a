"""Help pages in two columns; at a width of 80 no option name is cut and no example rewrapped."""

import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

_NAMES = 28  # width of the first column; after a longer name the description starts a new line
_FACTS = re.compile(r"\s+\[([^]]*)\]$")  # such as the default, at the end of a description

Row = tuple[str, str]


class Helpful:
    """A mixin for typer's commands and groups that prints options under their panels' titles."""

    help: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help page."""
        command: Any = self
        command.format_usage(ctx, formatter)
        for block in (self.help or "").split("\n\n"):
            example = block.startswith(" ")
            text = block if example else textwrap.fill(block, formatter.width)
            formatter.write(f"\n{text}\n")
        for title, rows in _sections(command, ctx).items():
            formatter.write(f"\n{title}:\n")
            for line in _lines(rows, formatter.width):
                formatter.write(f"{line}\n")


def paragraphs(function: Callable[..., None]) -> str:
    """A docstring with each paragraph on one line; indented paragraphs (examples) unchanged."""
    text = inspect.cleandoc(function.__doc__ or "")
    blocks = text.split("\n\n")
    return "\n\n".join(b if b.startswith(" ") else " ".join(b.split()) for b in blocks)


def _sections(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """Names and descriptions by section: arguments, options without a panel, panels, commands."""
    sections: dict[str, list[Row]] = defaultdict(list)
    for param in sorted(command.get_params(ctx), key=_order):
        record = param.get_help_record(ctx)
        if record is not None:
            argument = param.param_type_name == "argument"
            name = param.metavar or param.name.upper() if argument else record[0]
            sections[_title(param)].append((name, record[1]))
    for name in command.list_commands(ctx) if hasattr(command, "list_commands") else ():
        child = command.get_command(ctx, name)
        sections["Commands"].append((name, (child.help or "").split("\n\n")[0]))
    return sections


def _title(param: Any) -> str:
    general = "Arguments" if param.param_type_name == "argument" else "Options"
    return getattr(param, "rich_help_panel", None) or general


def _order(param: Any) -> int:
    """Sort key: arguments, then options without a panel, then the panels in order of definition."""
    general = ["Arguments", "Options"]
    return general.index(_title(param)) if _title(param) in general else len(general)


def _lines(rows: list[Row], width: int) -> Iterator[str]:
    """The lines of a section, in two columns."""
    names = min(_NAMES, max(len(name) for name, _ in rows))
    indent = " " * (names + 4)
    for name, description in rows:
        whole = _FACTS.sub(lambda facts: f" [{facts[1].replace(' ', chr(0))}]", description)
        wrapped = textwrap.wrap(whole, width - len(indent), break_on_hyphens=False)
        first, *more = [line.replace(chr(0), " ") for line in wrapped] or [""]
        if len(name) > names:
            yield f"  {name}"
            name = ""
        yield f"  {name:{names}}  {first}".rstrip()
        yield from (indent + line for line in more)
