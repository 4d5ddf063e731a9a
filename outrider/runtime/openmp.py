"""OpenMP's threads, of which each Python thread that computes has a pool of its own.

In GNU's runtime, which torch's wheels for Linux bring along, the threads of a pool spin between two
matrix products, unless the pools of all Python threads together have more threads than the machine
has processors. Then they sleep, and waking them takes longer than a product of a few rows: a round
in a second Python thread took 2.8 times as long on two cores. A thread that has computed therefore
ends its pool once another one may go on.

MKL, which multiplies eager models in float32, has a number of threads of its own for each thread
that calls it. torch sets it together with OpenMP's.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: keeps variables that belong to threads


def _find() -> ctypes.CDLL | None:
    """The runtime that torch has loaded; None where there is none such as GNU's."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        try:
            runtime = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
        except OSError:  # not loaded
            continue
        if hasattr(runtime, "omp_pause_resource_all"):  # of OpenMP 5.0
            return runtime
    return None


_RUNTIME = _find()


def _find_mkl() -> Callable[[int], int]:
    """MKL's function that sets how many threads it computes with for the calling thread, and
    returns the number before; ``int`` where torch comes without MKL."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu*"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            found: Callable[[int], int] = library.MKL_Set_Num_Threads_Local
            return found
    return int


_set_mkl_threads = _find_mkl()

release_threads: Callable[[], object] = (
    int if _RUNTIME is None else partial(_RUNTIME.omp_pause_resource_all, _SOFT)
)
"""Ends the threads of the calling thread's pool, outside parallel regions. Its next computation
starts them anew, which takes 0.1 ms. ``int``, which does nothing, without GNU's runtime."""


@contextmanager
def at_most_threads(num: int) -> Iterator[None]:
    """Within it, the calling thread computes with at most so many threads."""
    before = torch.get_num_threads()  # which also sets that of a thread that has not computed yet
    if _RUNTIME is None or num >= before:
        yield
        return
    _RUNTIME.omp_set_num_threads(max(1, num))
    mkl_before = _set_mkl_threads(max(1, num))
    try:
        yield
    finally:
        _set_mkl_threads(mkl_before)
        _RUNTIME.omp_set_num_threads(before)
