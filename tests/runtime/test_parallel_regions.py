"""Compiled loops use threads where they are long, and compute the same with and without them."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codegen import cpp
from torch._inductor.codegen.common import BracesBuffer
from torch.export import Dim, export

from outrider.runtime.executors.compile_cache import Program, compiled_program
from outrider.runtime.executors.parallel_regions import SHORT, regions_where_they_pay
from outrider.runtime.kernels.build import find_compiler, load_kernels

WIDTH = 96
LONG = SHORT // WIDTH + 1


class Rows(nn.Module):
    """Loops of each kind: by element, sums over each row and over all, and two that are fused."""

    def forward(self, x_RW: Tensor) -> tuple[Tensor, ...]:
        p_RW = (3 * x_RW).softmax(-1)
        return p_RW, p_RW.cumsum(0)[-1], (x_RW > 0).any(), x_RW.amax(), x_RW.sum(0)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    load_kernels()
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    sizes = ({0: Dim("rows", min=2)},)
    return compiled_program(
        Rows(), lambda: export(Rows(), (torch.ones(3, WIDTH),), dynamic_shapes=sizes), own=True
    )


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("rows", [2, 40, LONG, 3 * LONG])
def test_short_and_long_loops_compute_what_the_module_does(
    program: Program, threads: int, rows: int
) -> None:
    x_RW = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    for found, wanted in zip(program([x_RW]), Rows()(x_RW), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")
def test_each_region_depends_on_the_threads_and_the_work(program: Program, folder: Path) -> None:
    (path,) = folder.glob("programs/*.pt2")
    with ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".kernel.cpp")]
        lines = [line.strip() for name in names for line in archive.read(name).decode().split("\n")]
    opened = [i for i, line in enumerate(lines) if line.startswith("#pragma omp parallel")]
    assert opened
    for i in opened:
        assert lines[i - 2 : i + 2] == ["else", "{", "#pragma omp parallel", "region();"]
        asked = lines[i - 3]
        assert asked.startswith("if (omp_get_max_threads() == 1 || ")
        assert asked.endswith(f" < {SHORT}) region();")
    assert any("ks0" in lines[i - 3] for i in opened)  # rows are known at run time only


def test_another_code_generator_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of torch without the functions that are replaced, or with other arguments."""
    before = inspect.getattr_static(cpp.WorkSharing, "parallel")
    with regions_where_they_pay():
        assert inspect.getattr_static(cpp.WorkSharing, "parallel") is not before
    assert inspect.getattr_static(cpp.WorkSharing, "parallel") is before

    def other(self: object, threads: int, more: int) -> None: ...

    monkeypatch.setattr(cpp.WorkSharing, "parallel", other)
    with regions_where_they_pay():
        assert inspect.getattr_static(cpp.WorkSharing, "parallel") is other
    monkeypatch.delattr(cpp, "WorkSharing")
    with regions_where_they_pay():
        assert not hasattr(cpp, "WorkSharing")


def test_one_thread_at_a_time_replaces_the_functions() -> None:
    """Else the one that ends last would put the other's functions back, for good."""
    before = cpp.CppKernel.codegen_loops_impl, cpp.WorkSharing.parallel
    entered, ended = Event(), list[str]()

    def enter() -> None:
        entered.set()
        with regions_where_they_pay():
            ended.append("second")

    with regions_where_they_pay():
        other = Thread(target=enter)
        other.start()
        entered.wait()
        ended.append("first")
    other.join()
    assert ended == ["first", "second"]
    assert (cpp.CppKernel.codegen_loops_impl, cpp.WorkSharing.parallel) == before


def test_loops_that_another_thread_had_begun_are_long() -> None:
    """Their work was not noted, so that a short one has a region, too."""
    code = BracesBuffer()
    with regions_where_they_pay(), cpp.WorkSharing(code) as worksharing:
        worksharing.parallel(2)
    assert f"if (omp_get_max_threads() == 1 || {SHORT} < {SHORT}) region();" in code.getvalue()
