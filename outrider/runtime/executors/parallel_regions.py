"""Loops of compiled programs use threads where their work justifies it, and no OpenMP region else.

For programs that serve any number of threads (``cpp.dynamic_threads``), Inductor opens a parallel
region for every loop nest, however short. A region is a call of the OpenMP runtime, and in GNU's a
system call for waking others at its end, even if it has a single thread; with more threads it also
waits for them. A round of one row has hundreds of regions. Here each region becomes a function that
the calling thread runs itself where it is the only one or the loops are short:

    auto region = [&] { int tid = omp_get_thread_num(); … };      // loops with "omp for"
    if (omp_get_max_threads() == 1 || work < kShort) region();
    else
    {
        #pragma omp parallel
        region();
    }

Outside a region "omp for" is a loop like any other.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from threading import RLock
from types import ModuleType
from typing import Any
from unittest.mock import patch

SHORT = 1 << 15
"""Iterations below which a second thread does not pay: some 10 µs."""

_REPLACING = RLock()


@contextmanager
def regions_where_they_pay() -> Iterator[None]:
    """Makes Inductor write parallel regions this way, if it is a version that can be told. One
    thread at a time; what others compile meanwhile by torch itself computes the same."""
    from torch._inductor.codegen import cpp  # takes half a second, and only compiling needs it

    with _REPLACING:
        if not _can_be_told(cpp):
            yield
            return
        generate_loops = _noting_work(cpp.CppKernel.codegen_loops_impl)
        with (
            patch.object(cpp.CppKernel, "codegen_loops_impl", generate_loops),
            patch.object(cpp.WorkSharing, "parallel", _open_region),
        ):
            yield


def _can_be_told(cpp: ModuleType) -> bool:
    """Whether Inductor's code generator has the functions that are replaced."""
    loops = getattr(cpp.CppKernel, "codegen_loops_impl", None)
    parallel = getattr(getattr(cpp, "WorkSharing", None), "parallel", None)
    if loops is None or parallel is None or not hasattr(cpp, "LoopNest"):
        return False
    names = [[*inspect.signature(each).parameters] for each in (loops, parallel)]
    return names == [["self", "loop_nest", "code", "worksharing"], ["self", "threads"]]


def _noting_work(generate: Callable[..., None]) -> Callable[..., None]:
    """``CppKernel.codegen_loops_impl``, which also tells the region how many iterations loops
    have."""

    def generate_loops(kernel: Any, loop_nest: Any, code: Any, worksharing: Any) -> None:
        worksharing.next_work = _iterations(loop_nest)
        generate(kernel, loop_nest, code, worksharing)

    return generate_loops


def _iterations(loop_nest: Any) -> str:
    """The iterations of a loop nest, as C++; of fused nests, those of all that share its loops."""
    from torch._inductor.codegen.cpp_utils import cexpr_index

    here = prod(loop.size for loop in loop_nest.loops or [])
    fused = getattr(loop_nest.kernel, "inner", [])
    below = sum(prod(loop.size for loop in each.loops or []) for each in fused)
    return str(cexpr_index(here * below if fused else here))


def _open_region(self: Any, threads: int) -> None:
    """``WorkSharing.parallel``; its ``close`` ends what its stack has entered."""
    if self.in_parallel and threads != self.num_threads:
        self.close()
    if not self.in_parallel:
        self.num_threads, self.in_parallel, self.work = threads, True, []
        self.stack.enter_context(self.code.indent())
        self.code.writeline("auto region = [&]")
        self.stack.callback(_end_region, self.code, self.work)
        self.stack.enter_context(self.code.indent())
        self.code.writeline("int tid = omp_get_thread_num();")
    # unknown where another thread began these loops before the functions were replaced
    self.work.append(getattr(self, "next_work", str(SHORT)))


def _end_region(code: Any, work: list[str]) -> None:
    short = f"{' + '.join(work)} < {SHORT}"
    code.writelines([";", f"if (omp_get_max_threads() == 1 || {short}) region();", "else"])
    with code.indent():
        code.writelines(["#pragma omp parallel", "region();"])
