"""OpenMP's threads, of which each Python thread that computes has a pool of its own.

In GNU's runtime, which torch's wheels for Linux bring along, the threads of a pool spin between two
matrix products, unless the pools of all Python threads together have more threads than the machine
has processors. Then they sleep, and waking them takes longer than a product of a few rows: a round
in a second Python thread took 2.8 times as long on two cores. A thread that has computed therefore
ends its pool once another one may go on.
"""

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: keeps variables that belong to threads


def _find() -> Callable[[], object]:
    """``omp_pause_resource_all`` of the runtime that torch has loaded; ``int``, which does nothing,
    where there is none such as GNU's."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        try:
            runtime = ctypes.CDLL(str(path), mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            return partial(runtime.omp_pause_resource_all, _SOFT)
        except (OSError, AttributeError):  # not loaded, or from before OpenMP 5.0
            continue
    return int


release_threads: Callable[[], object] = _find()
"""Ends the threads of the calling thread's pool, outside parallel regions. Its next computation
starts them anew, which takes 0.1 ms."""
