"""The units of a program are compiled at the same time, and the linker waits for both."""

from threading import Event

import pytest
from torch._inductor.cpp_builder import CppBuilder

from outrider.runtime.executors.compiler_units import units_side_by_side

CALLS, LOOPS, LIBRARY = "/p.wrapper.o", "/p.kernel.o", "/p.wrapper.so"


class Builder(CppBuilder):
    """What Inductor compiles or links a file with."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_target_file_path(self) -> str:
        return self.target


def test_both_units_are_compiled_before_the_library_is_linked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler of the calls ends only once that of the loops has begun."""
    begun, ended = Event(), list[str]()

    def build(self: Builder) -> None:
        if self.target == LOOPS:
            begun.set()
        elif self.target == CALLS:
            assert begun.wait(60)
        ended.append(self.target)

    monkeypatch.setattr(CppBuilder, "build", build)
    with units_side_by_side():
        for target in (CALLS, LOOPS, LIBRARY):
            Builder(target).build()
    assert sorted(ended[:2]) == [LOOPS, CALLS]
    assert ended[2] == LIBRARY
    assert CppBuilder.build is build


def test_the_linker_raises_what_a_compiler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(self: Builder) -> None:
        if self.target == CALLS:
            raise RuntimeError("no space left on device")
        built.append(self.target)

    monkeypatch.setattr(CppBuilder, "build", build)
    with units_side_by_side():
        Builder(CALLS).build()
        Builder(LOOPS).build()
        with pytest.raises(RuntimeError, match="no space left"):
            Builder(LIBRARY).build()
    assert built == [LOOPS]
