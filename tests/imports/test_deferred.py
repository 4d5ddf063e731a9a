"""Imports that ``transformers`` makes for others wait until somebody calls what they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.imports import quicken_imports
from outrider.imports.finder import Finder

_REAL = "print('imported')\nother = 'name'\ndef double(x):\n    return 2 * x\n"


def _python(code: str, folder: Path) -> list[str]:
    """What code prints, to either stream, in a process that also imports from a folder."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return (done.stdout + done.stderr).splitlines()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package whose module ``importer`` imports its module ``real``."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "importer.py").write_text("from package.real import double\n")
    (folder / "asks_more.py").write_text("from package.real import double, other\n")
    (folder / "real.py").write_text(_REAL)
    return tmp_path


def test_a_deferred_module_is_imported_by_the_first_call(package: Path) -> None:
    assert _python(_defer("importer") + "print('first'); print(importer.double(3))", package) == [
        "first",
        "imported",
        "6",
    ]


def test_others_get_the_real_module_at_once(package: Path) -> None:
    code = _defer("importer") + "import package.real\nprint(package.real.other)"
    assert _python(code, package) == ["imported", "name"]


def test_a_name_that_is_not_deferred_imports_the_real_module(package: Path) -> None:
    assert _python(_defer("asks_more") + "print(asks_more.other)", package) == ["imported", "name"]


def _defer(importer: str) -> str:
    return (
        "from outrider.imports import deferred, finder\n"
        f"deferred._DEFERRED['package.{importer}'] = {{'package.real': ['double']}}\n"
        "sys.meta_path.insert(0, finder.Finder(deferred.runs()))\n"
        f"from package import {importer}\n"
    )


def test_loading_transformers_prints_nothing_and_imports_neither(tmp_path: Path) -> None:
    code = (
        "import outrider, transformers.modeling_utils\n"
        "outrider.load\n"
        "assert not {'torchao', 'scipy.optimize'} & set(sys.modules)"
    )
    assert _python(code, tmp_path) == []


def test_the_finder_is_installed_once() -> None:
    quicken_imports()
    (ours,) = (finder for finder in sys.meta_path if isinstance(finder, Finder))
    assert all(name.startswith("transformers.") for name in ours.runs)
