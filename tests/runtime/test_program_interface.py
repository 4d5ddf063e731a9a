"""Programs are linked with one compiled interface, instead of having its text."""

from pathlib import Path
from typing import Any

import pytest
from torch._inductor.cpp_builder import CppBuilder

from outrider.runtime.executors import program_interface
from outrider.runtime.executors.program_interface import interface_object, shared_interface

INTERFACE = program_interface._INTERFACE.read_text(encoding="utf-8")


class Builder(CppBuilder):
    """What Inductor compiles or links a file with."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._sources_args = "units"

    def get_target_file_path(self) -> str:
        return str(self.target)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of what is built, in place of the compiler; the interface is ``an object.o``."""
    sources: list[str] = []
    monkeypatch.setattr(CppBuilder, "build", lambda self: sources.append(self._sources_args))
    monkeypatch.setattr(program_interface, "interface_object", lambda _: Path("an object.o"))
    return sources


def test_the_text_of_the_interface_is_replaced_by_its_object(
    tmp_path: Path, built: list[str]
) -> None:
    unit = tmp_path / "p.wrapper.cpp"
    unit.write_text(f"// before\n{INTERFACE}\n// after\n")
    with shared_interface():
        for name in ("p.wrapper.o", "p.kernel.o", "p.wrapper.so"):
            Builder(tmp_path / name).build()
    calls, loops, library = built
    assert (loops, library) == ("units", "units 'an object.o'")
    text = Path(calls).read_text()
    assert "AOTInductorModelContainerCreate" not in text
    assert INTERFACE in unit.read_text()
    assert text.index("// before") < text.index("aoti_runtime/model.h") < text.index("// after")


def test_other_units_and_their_libraries_stay_as_they_are(tmp_path: Path, built: list[str]) -> None:
    unit = tmp_path / "p.wrapper.cpp"
    unit.write_text("// another interface\n")
    with shared_interface():
        Builder(tmp_path / "p.wrapper.o").build()
        Builder(tmp_path / "p.wrapper.so").build()
    assert built == ["units", "units"]
    assert unit.read_text() == "// another interface\n"


def test_the_linker_raises_what_the_compiler_of_the_interface_raises(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(compiler: str) -> Path:
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(program_interface, "interface_object", fail)
    (tmp_path / "p.wrapper.cpp").write_text(INTERFACE)
    with shared_interface():
        Builder(tmp_path / "p.wrapper.o").build()
        with pytest.raises(RuntimeError, match="no space left"):
            Builder(tmp_path / "p.wrapper.so").build()
    assert len(built) == 1


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    commands: list[Any] = []

    def compile(compiler: str, text: str, path: Path) -> None:
        commands.append(compiler)
        path.touch()

    monkeypatch.setattr(program_interface, "_compile", compile)
    found = interface_object("g++")
    assert interface_object("g++") == found
    assert commands == ["g++"]
    assert interface_object("clang++") != found


def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\ntouch "$last"\necho broken >&2\nexit 1\n')
    compiler.chmod(0o755)
    with pytest.raises(RuntimeError, match="cannot compile the interface of programs: broken"):
        interface_object(str(compiler))
    assert not list(tmp_path.glob("programs/*.o"))


def test_device_names_stand_in_for_one_regular_expression_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "outrider_match" in program_interface._device_names()  # of the torch that is installed
    header = program_interface._MODEL.read_text(encoding="utf-8")
    for changed in (header + "std::regex more;", header.replace("(cpu|cuda", "(cpu|tpu|cuda")):
        model = tmp_path / "model_base.h"
        model.write_text(changed)
        monkeypatch.setattr(program_interface, "_MODEL", model)
        program_interface._device_names.cache_clear()
        assert program_interface._device_names() == ""
    program_interface._device_names.cache_clear()
