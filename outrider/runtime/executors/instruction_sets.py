"""Inductor does not try instruction sets for which our kernels have been compiled.

It compiles a program for some instruction sets, and loads it in a Python process of its own, to see
whether the C++ compiler knows them: two seconds of each process that compiles for a processor with
AVX-512 VNNI. Our kernels have been compiled with the same flags by the same compiler.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from unittest.mock import patch

from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.runtime.kernels.processors import processor

_COMES_WITH = {"-mamx-int8": "-mamx-tile"}
"""Flags that every compiler knows which knows the other one."""

_REPLACING = RLock()


@contextmanager
def instruction_sets_known() -> Iterator[None]:
    """Makes Inductor try only instruction sets that our kernels do not use; all of them while no
    kernels are loaded. One thread at a time."""
    from torch._inductor.cpu_vec_isa import VecISA  # which only compiling needs

    known = set(processor().flags) if kernels_are_loaded() else set()
    with _REPLACING:
        check_build = VecISA.check_build

        def check(self: Any, code: str) -> bool:
            flags = self.build_arch_flags().split()
            is_known = all(_COMES_WITH.get(flag, flag) in known for flag in flags)
            return is_known or check_build(self, code)

        with patch.object(VecISA, "check_build", check):
            yield
