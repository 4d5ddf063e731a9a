"""``outrider config``: the configuration that ``outrider tune`` wrote, for other engines."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.configuration import FILE, find
from outrider.cli.errors import fail
from outrider.cli.group import Group, add_command


def export(
    engine: Annotated[
        str,
        typer.Argument(metavar="ENGINE", help="vllm, transformers or llama.cpp."),
    ],
    file: Annotated[
        Path,
        typer.Option(
            "--config", metavar="FILE", help="A configuration that `outrider tune` wrote."
        ),
    ] = Path(FILE),
) -> None:
    """Print a configuration for another engine.

    For vLLM it is the JSON of --speculative-config, for transformers the keyword arguments of
    generate, for llama.cpp the options of llama-server. An engine without the method is an error.

      vllm serve big/ --speculative-config "$(outrider config export vllm)"
    """
    if not file.is_file():
        raise fail(f"--config {file}: no such file; `outrider tune -o {file}` writes one")
    found = find(file)
    assert found is not None
    from outrider.lab.tune.export import export as exported

    typer.echo(exported(found, engine))


config = typer.Typer(
    name="config",
    cls=Group,
    help="The configuration that `outrider tune` wrote.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_command(config, export, "export")
