"""Typer groups and commands that report errors on one line and print two-column help pages."""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from outrider.cli.errors import INTERRUPTED, report, say
from outrider.cli.help import Helpful, paragraphs


class Switches:
    """A mixin for typer's commands and groups: a switch without a default is off.

    For a default of None typer would import pydantic, which takes longer than all else that a help
    page needs.
    """

    def get_params(self, ctx: Any) -> Any:
        """The parameters."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.default is None:
                param.default = False
        return params


class Command(Helpful, Switches, TyperCommand):
    """A command with a two-column help page."""


class Group(Helpful, Switches, TyperGroup):
    """A group that reports every error on one line, with the exit codes of ``cli/errors.py``."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            code = super().main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except Exception as error:
            code = report(error)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None


def add_command(app: typer.Typer, function: Callable[..., None], name: str) -> None:
    """Registers a function as a command, with its docstring as the help text.

    The help page wraps paragraphs; it prints indented paragraphs, which are examples, unchanged.
    """
    app.command(name, cls=Command, help=paragraphs(function))(expanded(function))


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose dataclass parameters are replaced by one option per field.

    Each option has the field's type and default. The command builds the dataclasses from the
    options and calls the function with them.
    """
    taken = inspect.signature(function, eval_str=True).parameters.values()
    classes: dict[str, Any] = {
        each.name: each.annotation for each in taken if is_dataclass(each.annotation)
    }
    given = [
        inspect.Parameter(
            field.name,
            each.KEYWORD_ONLY,
            default=_default(field),
            annotation=_named(kind, field.name),
        )
        for each in taken
        for field, kind in (
            [(field, field.type) for field in fields(classes[each.name])]
            if each.name in classes
            else [(each, each.annotation)]
        )
    ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        values = {name: _from_home(value) for name, value in values.items()}
        for name, kind in classes.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        function(**values)

    command.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in given}
    return command


def _named(annotation: Any, name: str) -> Any:
    """The annotation of an option with its name. Typer 0.27 drops some of the options whose
    annotation gives none, such as ``--device``."""
    kind, *others = get_args(annotation) or (annotation,)
    option = next((each for each in others if isinstance(each, OptionInfo)), None)
    if option is None or option.param_decls or option.default is not ... or kind is bool:
        return annotation
    named = copy(option)
    named.param_decls = (f"--{name.replace('_', '-')}",)
    return Annotated[kind, named]


def _default(parameter: Any) -> Any:
    """The default of a function's parameter, or of a field; empty for a required one."""
    return inspect.Parameter.empty if parameter.default is MISSING else parameter.default


def _from_home(value: Any) -> Any:
    """The value with ``~`` expanded in paths, which the shell leaves alone in ``--out=~/x``."""
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))
    return [_from_home(each) for each in value] if isinstance(value, list) else value
