"""Imports the names of a package when they are first used (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

from outrider.imports.garbage import importing


def lazy(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Builds ``__getattr__`` and ``__dir__`` for a package.

    Args:
        package: name of the package.
        homes: for each name, the module that defines it.

    Returns:
        ``__getattr__``, which imports a name on first use and then stores it in the package, and
        ``__dir__``, which lists all names.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing():
            value: object = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
