"""Imports torch and transformers, silently, for commands that need models."""

from importlib import import_module

from outrider.cli.progress import Progress
from outrider.cli.quiet import silence, silence_transformers
from outrider.engine.compiler_process import begin_ahead
from outrider.imports.garbage import importing


def start(module: str = "outrider.engine.loading", *, compiles: bool = False) -> None:
    """Imports a module and the libraries it needs, with a progress display on a terminal.

    Args:
        module: the module that the command is about to use.
        compiles: whether it will compile models. On a machine without kernels, another process
            compiles these during the imports.
    """
    silence()
    if compiles:
        begin_ahead()
    with Progress() as progress:
        progress.show("importing torch and transformers")
        with importing():
            silence_transformers()
            import_module(module)
