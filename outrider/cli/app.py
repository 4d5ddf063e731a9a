"""The application: its commands, ``--version``, and the help page shown without a command."""

import sys
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.analyse import analyse
from outrider.cli.batch import batch
from outrider.cli.bench import bench
from outrider.cli.certify import certify
from outrider.cli.chat import chat
from outrider.cli.compile import compile_ahead
from outrider.cli.config import config
from outrider.cli.demo import demo
from outrider.cli.distill import distill
from outrider.cli.frontier import frontier
from outrider.cli.generate import generate
from outrider.cli.group import Group, add_command
from outrider.cli.help import paragraphs
from outrider.cli.methods import methods
from outrider.cli.ngram import ngram
from outrider.cli.plan import plan
from outrider.cli.profile import profile
from outrider.cli.report import report
from outrider.cli.serve import serve
from outrider.cli.sharded import check_command
from outrider.cli.sharding import sharding
from outrider.cli.train import train
from outrider.cli.train_head import train_head
from outrider.cli.tree_plan import tree_plan
from outrider.cli.tune import tune


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit()


def _outrider(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Speculative decoding: faster generation with exactly the same output distribution.

    A small draft model proposes a few tokens; the large target model verifies them in one forward
    pass, keeps those it accepts and adds one of its own. A demonstration, offline, in under a
    minute:

      outrider demo

    Continue a text of your own, with each token coloured by its origin:

      outrider generate $'def read_text(path):\\n    with open(path, encoding=' \\
        --temperature 0.8 --top-p 0.9 --stop $'\\n\\n' --trace
    """
    check_command(context.invoked_subcommand)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(
    name="outrider",
    cls=Group,
    callback=_outrider,
    help=paragraphs(_outrider),
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_command(app, demo, "demo")
add_command(app, generate, "generate")
add_command(app, chat, "chat")
add_command(app, serve, "serve")
add_command(app, batch, "batch")
add_command(app, compile_ahead, "compile")
add_command(app, methods, "methods")
add_command(app, certify, "certify")
add_command(app, bench, "bench")
add_command(app, tune, "tune")
add_command(app, frontier, "frontier")
add_command(app, tree_plan, "tree-plan")
add_command(app, profile, "profile")
add_command(app, analyse, "analyse")
add_command(app, plan, "plan")
add_command(app, report, "report")
add_command(app, sharding, "sharding")
add_command(app, train, "train")
add_command(app, distill, "distill")
add_command(app, train_head, "train-head")
app.add_typer(ngram)
app.add_typer(config)


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # a character the terminal lacks must not be an error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="outrider")
