"""``outrider compile``: compiles ahead what a pair of models and a method need."""

import time
from dataclasses import replace

import typer

from outrider.cli.engines import open_engine, require_draft_of
from outrider.cli.errors import FAILED, INTERRUPTED, say
from outrider.cli.options.models import Models
from outrider.cli.options.speculation import Speculation
from outrider.cli.start import start


def compile_ahead(models: Models, speculation: Speculation) -> None:
    """Compile ahead what --compile auto needs, so that the next start does not wait for it.

    Give the same models, method and precision as the later command:

      outrider compile --target big/ --draft small/ --num-speculative-tokens 4

    Programs are kept in the cache folder, and models of one architecture and size share them.
    Ctrl-C loses only the program that is being compiled. Exits with code 1 if something does not
    compile.
    """
    require_draft_of(speculation.method, models)
    if models.compile == "off":
        models = replace(models, compile="auto")
    start(compiles=models.compiles)
    from outrider.cache_folder import cache_folder
    from outrider.engine.warming import load_compiled, programs_of, refused

    began = time.monotonic()
    try:
        engine = open_engine(models, speculation, time_left=True)
    except KeyboardInterrupt:
        say(f"interrupted: {cache_folder()} keeps the programs that are compiled")
        raise typer.Exit(INTERRUPTED) from None
    num = len(programs_of(engine))
    missing = [stage.what for stage in load_compiled(engine)] + refused(engine)
    if not num or missing or engine.target.compiled is None or engine.target.compiled.failed:
        say(f"not compiled: {', '.join(missing) or engine.target.name}; runs eagerly")
        raise typer.Exit(FAILED)
    typer.echo(f"{num} programs in {cache_folder()}, {time.monotonic() - began:.0f} s")
