"""Where compiled kernels and programs are kept, and what else can be made again.

The folder is ``OUTRIDER_CACHE``, else ``outrider`` below ``XDG_CACHE_HOME``, else below
``~/.cache``.
"""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache folder."""
    if folder := os.environ.get("OUTRIDER_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"
