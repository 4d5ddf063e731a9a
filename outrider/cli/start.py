"""The start of a command that needs models: torch and transformers, imported quietly."""

from importlib import import_module

from outrider.cli.progress import Progress
from outrider.cli.quiet import silence, silence_transformers


def start(module: str = "outrider.engine") -> None:
    """Imports a module and the libraries it needs; a terminal shows that this takes its time.

    Args:
        module: what the command is about to use.
    """
    silence()
    with Progress() as progress:
        progress.show("importing torch and transformers")
        silence_transformers()
        import_module(module)
