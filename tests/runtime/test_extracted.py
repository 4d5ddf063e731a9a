"""What torch extracts to load a program is removed as soon as the program is mapped."""

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

import pytest
import torch
from test_compile_cache import Affine, needs_compiler, tracer

from outrider.runtime.executors import compile_cache
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.executors.extracted import load_library
from outrider.runtime.executors.library import TorchLibrary

CPU = torch.device("cpu")
LIBRARY = "0123.456/data/aotinductor/model/abc.wrapper.so"

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="only Linux lists what a process has mapped"
)


class Loader:
    """Stands in for torch's: extracts an archive to a temporary folder and maps the library."""

    folder: Path

    def __init__(self, path: str, name: str, single: bool, runners: int, index: int) -> None:
        Loader.folder = self.folder = Path(mkdtemp(prefix="aotinductor_"))
        with ZipFile(path) as archive:
            archive.extractall(self.folder)
        with open(self.folder / LIBRARY, "rb") as file:
            self.library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archive of a program."""
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Loader)
    monkeypatch.setattr("outrider.runtime.executors.extracted.kernels_are_loaded", lambda: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "program.pt2"
    with ZipFile(path, "w") as archive:
        archive.writestr("0123.456/version", "1")
        archive.writestr(LIBRARY, "machine code")
    return path


def loader_of(path: Path, device: torch.device) -> Loader:
    library = load_library(path, device)
    assert isinstance(library, TorchLibrary)
    loader: Loader = library._loader
    return loader


def extracted(folder: Path) -> list[Path]:
    return sorted(folder.glob("aotinductor_*"))


def test_the_folder_of_a_mapped_program_is_removed(package: Path) -> None:
    first = loader_of(package, CPU)
    assert not first.folder.exists()
    second = loader_of(package, CPU)
    assert not extracted(package.parent)
    assert bytes(first.library) == bytes(second.library) == b"machine code"


def test_the_folder_of_another_process_stays(package: Path) -> None:
    """It may be mapped there, or be about to be; here it is not."""
    other = package.parent / "aotinductor_other"
    with ZipFile(package) as archive:
        archive.extractall(other)
    loader_of(package, CPU)
    assert extracted(package.parent) == [other]
    assert (other / LIBRARY).read_text() == "machine code"


def test_a_program_for_cuda_keeps_its_folder(package: Path) -> None:
    """It reads its kernels there when it first runs."""
    loader = loader_of(package, torch.device("cuda", 0))
    assert (loader.folder / LIBRARY).exists()


def test_where_mapped_files_are_not_listed_the_folder_stays(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.runtime.executors.extracted._MAPS", package.parent / "none")
    assert loader_of(package, CPU).folder.exists()


def test_a_program_that_calls_operators_by_name_is_loaded_by_torch(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loader alone reads the file that lists them."""
    monkeypatch.setattr("outrider.runtime.executors.extracted.kernels_are_loaded", lambda: True)
    loaded: list[Path] = []

    def shared(path: Path) -> Path:
        assert path.read_text() == "machine code"
        loaded.append(path)
        return path

    monkeypatch.setattr("outrider.runtime.executors.extracted.SharedLibrary", shared)
    mapped = load_library(package, CPU)
    assert loaded == [mapped]
    assert not loaded[0].exists()
    with ZipFile(package, "a") as archive:
        archive.writestr(LIBRARY.replace(".so", ".json"), "{}")
    assert not loader_of(package, CPU).folder.exists()
    assert loaded == [mapped]


def mapped_programs() -> list[str]:
    """The libraries of programs that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.partition("/")[2] for line in lines if "/data/aotinductor/" in line]


KILLED = """
import os, signal, sys
from test_compile_cache import Affine, tracer
from outrider.runtime.executors.compile_cache import compiled_program
compiled_program(Affine(), tracer(Affine(), []), own=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_compiler
@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run without their files, here and in a process that is killed, which loads the one
    that is compiled here: it has no kernels, upon which the name of a program depends."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "kernels_are_loaded", lambda: False)
    module = Affine()
    program = compiled_program(module, tracer(module, []), own=True)
    assert mapped_programs()
    assert all(each.endswith(" (deleted)") for each in mapped_programs())
    x_N4 = torch.randn(3, 4)
    torch.testing.assert_close(program([x_N4])[0], module(x_N4)[0])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("cache/programs/*.pt2"))) == 1
    assert not extracted(scratch)
