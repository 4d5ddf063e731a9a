"""Loads compiled programs, and removes the files that torch extracts for them.

torch extracts a program's archive to a temporary folder, maps the library in it, and removes the
folder with the program: never, if the process is killed before. A library that is mapped needs its
file no more. So a process removes the folder at once, its own and no other's, and leaves nothing
however it ends.

Linux lists what a process has mapped; on other systems the folder stays as long as the program. It
does on CUDA, too, where a program reads its kernels from the folder when it first runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Lock
from zipfile import ZipFile

import torch

from outrider.runtime.executors.library import Library, SharedLibrary, TorchLibrary
from outrider.runtime.kernels import kernels_are_loaded

_MAPS = Path("/proc/self/maps")
_LOADING = Lock()  # a program of another thread may be mapped, but not read to its end


def load_library(path: Path, device: torch.device) -> Library:
    """Loads a program.

    Args:
        path: the archive.
        device: where the program runs.

    Raises:
        Exception: what torch raises, for a file cut short or a library that is missing.
    """
    with _LOADING:
        if device.type != "cpu":
            return TorchLibrary(path, device)
        shared = kernels_are_loaded()
        library = SharedLibrary(path) if shared else TorchLibrary(path, device)
        for folder in _extracted(path):
            shutil.rmtree(folder, ignore_errors=True)
    return library


def _extracted(path: Path) -> set[Path]:
    """The folders to which this process has extracted a program's archive."""
    with ZipFile(path) as archive:
        libraries = [f"/{name}" for name in archive.namelist() if name.endswith(".so")]
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {
        Path(mapped.removesuffix(name))
        for mapped in {line.partition("/")[1] + line.partition("/")[2] for line in lines}
        for name in libraries
        if mapped.endswith(name)
    }
