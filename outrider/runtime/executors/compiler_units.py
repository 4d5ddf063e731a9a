"""The C++ units of a program are compiled at the same time.

Inductor writes a program as two units, loops and what calls them, and has them compiled one after
the other. Here the compiler of the calls is started first, and awaited by the linker.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import RLock
from typing import Any
from unittest.mock import patch

CALLS = ".wrapper"
"""How the name of the unit with the calls ends."""

_REPLACING = RLock()


@contextmanager
def units_side_by_side() -> Iterator[None]:
    """Makes Inductor compile both units of a program at the same time. One thread at a time."""
    from torch._inductor.cpp_builder import CppBuilder  # which only compiling needs

    build, running = CppBuilder.build, list[Future[None]]()

    def side_by_side(self: Any) -> None:
        if self.get_target_file_path().endswith(f"{CALLS}.o"):
            running.append(threads.submit(build, self))
            return
        if not self.get_target_file_path().endswith(".o"):
            while running:
                running.pop().result()  # raises what the compiler's failure raises
        build(self)

    with (
        _REPLACING,
        ThreadPoolExecutor(1) as threads,
        patch.object(CppBuilder, "build", side_by_side),
    ):
        yield
