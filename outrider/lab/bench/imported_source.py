"""A hash of the code that a metric runs: the module that defines it, and all that it imports.

Imports are read from the source, those inside functions included, and followed through every module
that no installed distribution owns, and through this package. A distribution counts by its version.
The standard library and the parts of this package that run while a cell is timed are left out,
since the key of the cell depends on both. Files that are no Python, and modules that are imported
by a name that is computed, are not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import resolve_name
from pathlib import Path

from outrider.lab.bench.identity import MEASURED, PACKAGE


@cache
def imported_source(module: str, file: Path) -> str:
    """The hash.

    Args:
        module: name of the module that defines the metric, such as ``mine.metrics``.
        file: its source.
    """
    files, versions = _reached(module, file)
    digest = sha256()
    for name, content in sorted({**files, **versions}.items()):
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:16]


def _reached(module: str, file: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The hashes of the modules that are reached, and the versions of the distributions."""
    own = {module.partition(".")[0], PACKAGE.name}
    files: dict[str, str] = {}
    versions: dict[str, str] = {}
    pending = [(module, file)]
    while pending:
        name, path = pending.pop()
        if name in files or _is_measured(path):
            continue
        source = path.read_bytes()
        files[name] = sha256(source).hexdigest()
        for imported in _imports(source, name, path):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names:
                continue
            released = None if top in own else _version(top)
            if released is not None:
                versions[f"{top} version"] = released
            elif (found := _source_of(imported)) is not None:
                pending.append((imported, found))
    return files, versions


def _imports(source: bytes, module: str, path: Path) -> Iterator[str]:
    """The names that a module imports. ``from a import b`` may be of a module ``a.b``, or of a
    name in ``a``: both are given."""
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            base = resolve_name(relative, package) if node.level else relative
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_measured(path: Path) -> bool:
    """Whether a file runs while a cell is timed."""
    if not path.is_relative_to(PACKAGE):
        return False
    inside = path.relative_to(PACKAGE)
    return any(inside.is_relative_to(part) for part in MEASURED)


def _source_of(name: str) -> Path | None:
    """The file of a module; None where there is none. Nothing is imported to find it."""
    search: list[str] | None = None
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:number]), search)
        if spec is None:
            return None
        if number == len(parts):
            file = Path(spec.origin) if spec.origin else None
            return file if file is not None and file.suffix == ".py" else None
        if spec.submodule_search_locations is None:
            return None
        search = list(spec.submodule_search_locations)
    return None


@cache
def _version(top: str) -> str | None:
    """The version of the distribution that owns a top-level module; None where none does."""
    try:
        return version(top)
    except PackageNotFoundError:
        owners = packages_distributions().get(top)
        return version(owners[0]) if owners else None
