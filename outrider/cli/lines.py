"""Lines that a user types, with editing and history, or that a pipe or a file holds."""

import sys
from collections.abc import Iterator
from contextlib import suppress

import typer


def is_interactive() -> bool:
    """Whether a user types at a terminal."""
    return sys.stdin.isatty()


def lines(prompt: str) -> Iterator[str]:
    """Lines of standard input without their ends, until it ends.

    At a terminal each is asked for by the prompt, and Ctrl-C or Ctrl-D end them. Prompts never go
    to a standard output that is a file or a pipe.
    """
    if not is_interactive():
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):  # as on Windows, where the console does what readline does
        import readline  # noqa: F401  # input() then edits lines and remembers them
    while True:
        try:
            yield _asked(prompt)
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return


def _asked(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    typer.echo(prompt, err=True, nl=False)
    return input()
