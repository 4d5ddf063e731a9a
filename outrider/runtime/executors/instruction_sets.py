"""Spares Inductor the instruction sets that the C++ compiler is known to support.

To see whether the compiler supports an instruction set such as AVX-512 VNNI, Inductor compiles a
small library for it and loads that in a new Python process. This took each process that compiles
programs two seconds on a processor with AMX. The same compiler has compiled our kernels with the
same flags, so the answer is known.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any
from unittest.mock import patch

from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.runtime.kernels.processors import processor

_COMES_WITH = {"-mamx-int8": "-mamx-tile"}
"""Flags that our kernels do without, and the flag that every compiler introduced with each."""

_REPLACING = RLock()


@contextmanager
def instruction_sets_known() -> Iterator[None]:
    """Within it, Inductor tries only instruction sets that our kernels do not use, or all of them
    if no kernels are loaded. One thread at a time."""
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
