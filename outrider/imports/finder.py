"""Has functions of ours run some modules of other packages when they are imported."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Execute = Callable[[ModuleType], None]
Run = Callable[[ModuleType, Execute], None]
"""Runs a module, given also what would run it otherwise."""


class Finder(MetaPathFinder):
    """Finds modules as Python would.

    Args:
        runs: by module, what runs it; all other modules are left to Python.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self.runs = runs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.runs:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.runs[fullname])
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, run: Run) -> None:
        self._loader, self._run = loader, run

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._run(module, self._loader.exec_module)


def install(runs: Mapping[str, Run]) -> None:
    """Has modules that are imported from now on run by these functions."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(runs))
