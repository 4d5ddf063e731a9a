"""Failures of the compile cache: folders that cannot be written, full disks, several processes,
other versions and damaged files. Each gives a warning that says so, and a correct result."""

import errno
import gc
import json
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from tiny_models import ragged_prompts, tiny
from torch import Tensor, nn

from outrider.core.errors import KernelError, OutriderWarning
from outrider.runtime import cached_files
from outrider.runtime.executors import compile_cache
from outrider.runtime.executors.compile_cache import (
    Missing,
    Program,
    ProgramMissingError,
    compiled_program,
    when_missing,
)
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.kernels import build
from outrider.runtime.prefill import unsampled_context

X_3 = torch.tensor([1.0, 2.0, 3.0])


class Double(nn.Module):
    def forward(self, x_N: Tensor) -> tuple[Tensor]:
        return (2 * x_N,)


class Compiler:
    """Stands for tracing and Inductor: a program is a file that says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_compiled = 0
        monkeypatch.setattr(compile_cache, "_compile", self.compile)
        monkeypatch.setattr(compile_cache, "_load", self.load)

    def compile(self, program: object, path: Path, options: object, device: object) -> None:
        self.num_compiled += 1
        path.write_text("a program")

    def load(self, path: Path, tensors: object, device: object) -> Program:
        if path.read_text() != "a program":
            raise RuntimeError("file in archive is not in a subdirectory")
        return lambda inputs: [2 * each for each in inputs]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    cached_files._substitute.cache_clear()
    yield folder
    cached_files._substitute.cache_clear()


def doubled() -> list[float]:
    program = compiled_program(Double(), lambda: torch.export.export(Double(), (X_3,)), own=True)
    return program([X_3])[0].tolist()


def programs(folder: Path) -> list[Path]:
    return sorted((folder / "programs").glob("*.pt2"))


def test_a_program_is_compiled_once(compiler: Compiler, folder: Path) -> None:
    assert doubled() == doubled() == [2, 4, 6]
    assert compiler.num_compiled == len(programs(folder)) == 1


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collection_is_as_it_was(compiler: Compiler, folder: Path, on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        doubled()
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_a_folder_that_cannot_be_written_is_replaced(compiler: Compiler, folder: Path) -> None:
    folder.write_text("a file in the place of the folder")
    with pytest.warns(OutriderWarning, match="cannot be written .*name another folder") as seen:
        assert doubled() == [2, 4, 6]
    assert str(folder) in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert doubled() == [2, 4, 6]
    assert compiler.num_compiled == 1


def test_a_read_only_folder_is_read(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that are in it are loaded, without a warning."""
    doubled()
    monkeypatch.setattr(cached_files, "_reason_against_writing", lambda _: "Read-only file system")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doubled() == [2, 4, 6]
    assert compiler.num_compiled == 1


def test_a_damaged_program_is_compiled_anew(compiler: Compiler, folder: Path) -> None:
    doubled()
    (path,) = programs(folder)
    path.write_text("a pro")
    with pytest.warns(OutriderWarning, match=rf"cannot load the program {path}.*compiled anew"):
        assert doubled() == [2, 4, 6]
    assert compiler.num_compiled == 2
    assert path.read_text() == "a program"


def test_programs_of_another_version_are_named(compiler: Compiler, folder: Path) -> None:
    doubled()
    versions = folder / "programs" / "versions.json"
    now = json.loads(versions.read_text())
    assert now["torch"] == torch.__version__
    versions.write_text(json.dumps(now | {"torch": "2.0.1"}))
    programs(folder)[0].rename(folder / "programs" / "other.pt2")
    with pytest.warns(OutriderWarning, match=r"were compiled for torch 2\.0\.1, .*delete"):
        assert doubled() == [2, 4, 6]
    assert json.loads(versions.read_text()) == now


def test_processors_of_two_kinds_share_a_folder(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has programs of its own, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for capability in ("AVX2", "DEFAULT", "AVX2"):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
            assert doubled() == [2, 4, 6]
    assert compiler.num_compiled == 2


def test_missing_programs_are_left_where_a_thread_only_loads(
    compiler: Compiler, folder: Path
) -> None:
    with when_missing(Missing.LEAVE) as left, pytest.raises(ProgramMissingError):
        doubled()
    assert len(left) == 1
    assert compiler.num_compiled == 0
    doubled()
    with when_missing(Missing.LEAVE) as left:
        assert doubled() == [2, 4, 6]
    assert not left


def test_a_program_that_another_process_compiles_is_left_or_awaited(
    compiler: Compiler, folder: Path
) -> None:
    with when_missing(Missing.LEAVE) as left, pytest.raises(ProgramMissingError):
        doubled()
    found: list[list[float]] = []
    waiting = Thread(target=lambda: found.append(doubled()))
    with cached_files.locked(left[0]):
        another = pytest.raises(ProgramMissingError, match="another process")
        with when_missing(Missing.COMPILE_UNLOCKED) as skipped, another:
            doubled()
        assert skipped == left
        waiting.start()
        left[0].write_text("a program")  # by the other process
    waiting.join()
    assert found == [[2, 4, 6]]
    assert compiler.num_compiled == 0


def test_file_systems_without_locks_do_without(
    compiler: Compiler, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    assert doubled() == [2, 4, 6]


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("at", ["literals", "program"])
def test_a_model_runs_eagerly_where_the_disk_is_full(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It says so, gives the same logits, and leaves no half of a file."""

    def fail(*arguments: Any, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "literals":
        monkeypatch.setattr(torch, "save", fail)
    else:
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    monkeypatch.setattr("outrider.runtime.executors.program_interface.interface_object", fail)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(9, 9, 2**20))
    model = tiny()
    (prompt,) = ragged_prompts([6])
    wanted = logits(model, prompt)
    model.compiled = CompiledExecutor(model.module, model.spec, "full")
    with pytest.warns(OutriderWarning, match=r"runs eagerly: .*No space left.*1 MiB left.*OUTRID"):
        found = logits(model, prompt)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    names = {path.suffix for path in (folder / "programs").iterdir()}
    assert names <= {".lock", ".json"}


def logits(model: Any, prompt: list[int]) -> Tensor:
    context = unsampled_context(model, prompt)
    with torch.inference_mode():
        cache = model.start(context)
        found: Tensor = model.forward(ForwardBatch(cache, context.tokens_BT[:, -1:])).logits_BNV
    return found


def test_kernels_name_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "kernels_are_loaded", lambda: False)
    monkeypatch.setattr(build, "compile_kernels", fail)
    with pytest.raises(KernelError, match=r"cannot compile the kernels.*No space left"):
        build.load_kernels()
