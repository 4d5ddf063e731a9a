"""Stores which names the modules of ``transformers`` define.

``transformers`` imports a model's classes when they are first used. To know which modules define
them, it reads the 1,500 files of its models whenever it is imported, twice, which takes a fifth of
the time that the second start of a command does. What it found is stored in the cache folder, and
holds as long as each of these files has the size and the time of last modification that it had.
"""

import hashlib
import marshal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from outrider.cache_folder import cache_folder
from outrider.imports.finder import Execute, Run

_MODULE = "transformers.utils.import_utils"
_SCAN = "create_import_structure_from_path"

Scan = Callable[[str | os.PathLike[str]], Any]
"""Finds the names that the modules of a folder, or of the folder of a file, define: a dictionary of
strings, sets and the like."""


def runs() -> dict[str, Run]:
    """What runs the module whose function finds these names."""
    return {_MODULE: _run}


def _run(module: ModuleType, execute: Execute) -> None:
    """Runs the module, and replaces its function, if it has one of that name."""
    execute(module)
    scan = getattr(module, _SCAN, None)
    if scan is not None and module.__file__ is not None:
        models = Path(module.__file__).parents[1] / "models"
        setattr(module, _SCAN, stored(scan, models, (module.__file__,)))


def stored(scan: Scan, folder: Path, sources: tuple[str, ...] = ()) -> Scan:
    """The function, which looks up what it finds in one folder. It calls itself for the folders in
    it.

    Args:
        scan: the function.
        folder: the folder.
        sources: files that define the function.
    """
    names = {str(folder), str(folder / "__init__.py")}

    def scan_or_look_up(path: str | os.PathLike[str]) -> Any:
        if os.fspath(path) not in names:
            return scan(path)
        file = _file(folder, sources)
        found = None if file is None else _read(file)
        if found is None:
            found = scan(path)
            if file is not None:
                _write(file, found)
        return found

    return scan_or_look_up


def _fingerprint(folder: Path, sources: tuple[str, ...]) -> str:
    """Changes with each file of a folder and with the version of Python, whose format is stored."""
    files = sorted([*_files(str(folder)), *map(_state, sources)])
    state = repr((sys.version, str(folder), files))
    return hashlib.sha256(state.encode()).hexdigest()[:32]


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    """The state of each file in a folder and in the folders in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path)
            else:
                yield _state(entry)


def _state(file: str | os.DirEntry[str]) -> tuple[str, int, int]:
    state = os.stat(file)
    return os.fspath(file), state.st_size, state.st_mtime_ns


def _file(folder: Path, sources: tuple[str, ...]) -> Path | None:
    """Where it is stored; None where a file cannot be looked at, or there is no cache folder, such
    as where nobody knows the user's home."""
    with suppress(OSError, RuntimeError):
        return cache_folder() / "import_structure" / _fingerprint(folder, sources)
    return None


def _read(file: Path) -> Any:
    """What is stored; None if nothing is, or what cannot be read."""
    with suppress(OSError, EOFError, ValueError, TypeError):
        return marshal.loads(file.read_bytes())
    return None


def _write(file: Path, found: Any) -> None:
    """Stores it, where that is possible."""
    with suppress(OSError, ValueError):
        content = marshal.dumps(found)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(file)
