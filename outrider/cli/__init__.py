"""The command line: ``outrider generate``, ``methods``, ``demo`` and the other commands.

Only this package and the scripts print. Its modules import torch and transformers inside the
commands, so that help and completion are fast.
"""

from outrider.cli.app import app, main

__all__ = ["app", "main"]
