"""The command line: ``outrider generate``, ``methods``, ``demo``, ``train``.

Only this package and scripts print. Modules here import torch and transformers inside commands, so
that help and completion are quick.
"""

from outrider.cli.app import app, main

__all__ = ["app", "main"]
