"""Loads compiled programs, and removes the files that are extracted for them.

A library that is mapped needs its file no more, so that of a program is extracted to a temporary
folder, mapped, and removed at once. torch's own loader removes the folder with the program: never,
if the process is killed before. What it has extracted, and nothing of another process, is removed
here, too.

Linux lists what a process has mapped; on other systems torch's folder stays as long as the program.
It does on CUDA, too, where a program reads its kernels from the folder when it first runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
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
    if device.type != "cpu":
        return TorchLibrary(path, device)
    if kernels_are_loaded() and (library := _shared_library(path)):
        return library
    with _LOADING:
        loaded = TorchLibrary(path, device)
        for folder in _extracted(path):
            shutil.rmtree(folder, ignore_errors=True)
    return loaded


def _shared_library(path: Path) -> SharedLibrary | None:
    """The library in an archive; none if it calls operators by their names, which torch's loader
    lists in a file beside it."""
    with ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        if name.removesuffix(".so") + ".json" in archive.namelist():
            return None
        with TemporaryDirectory(prefix="outrider_") as folder:
            return SharedLibrary(Path(archive.extract(name, folder)))


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
