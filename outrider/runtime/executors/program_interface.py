"""What the libraries of all programs for a CPU have in common is compiled once.

Inductor puts the text of torch's ``interface.cpp``, the C functions by which a program is loaded
and called, into the unit of each program's calls, where it takes the compiler as long as the rest.
Here it is a unit of its own, in the cache folder, and each program is linked with it.
"""

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from outrider.runtime.cached_files import cached_file, locked
from outrider.runtime.executors.compiler_units import CALLS

_TORCH = Path(torch.__file__).parent
_INTERFACE = _TORCH / "_inductor" / "codegen" / "aoti_runtime" / "interface.cpp"
_MODEL = _TORCH / "include" / "torch" / "csrc" / "inductor" / "aoti_runtime" / "model_base.h"
_DEVICE_NAMES = Path(__file__).with_name("device_names.h")

_PATTERN = 'std::regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");'
"""The regular expression of torch's header that ``device_names.h`` does without, if it is the only
one."""

_MESSAGE = "static thread_local std::string g_aoti_last_error;"
_KEPT_MESSAGE = "static thread_local std::string& g_aoti_last_error = *new std::string;"
"""The interface's last error. A thread calls the string's destructor when it ends, and keeps the
library of a program mapped until then. A reference has no destructor; its string is never freed."""

_PRECEDING = "#include <torch/csrc/inductor/aoti_include/cpu.h>\n"
"""What precedes the interface in a unit."""

_INCLUDES = """
#include <torch/csrc/inductor/aoti_runtime/model.h>
#include <iostream>
#include <string>
#include <unordered_map>
#include <vector>
"""
"""What other code of a unit needs of what the interface includes."""

_FLAGS = ("-O1", "-DNDEBUG", "-fPIC", "-std=c++20", "-w")


@contextmanager
def shared_interface() -> Iterator[None]:
    """Makes Inductor compile programs without the interface, and link them with the shared one. One
    thread at a time, as :func:`units_side_by_side` sees to."""
    from torch._inductor.cpp_builder import CppBuilder, get_cpp_compiler

    build, objects = CppBuilder.build, list[Future[Path]]()

    def with_shared(self: Any) -> None:
        target = self.get_target_file_path()
        if target.endswith(f"{CALLS}.o"):
            if shortened := _shortened(Path(target).with_suffix(".cpp")):
                self._sources_args = shlex.quote(str(shortened))
                objects.append(compiled)
        elif objects and not target.endswith(".o"):
            self._sources_args += f" {shlex.quote(str(objects.pop().result()))}"
        build(self)

    with ThreadPoolExecutor(1) as threads, patch.object(CppBuilder, "build", with_shared):
        compiled = threads.submit(interface_object, get_cpp_compiler())
        yield


def interface_object(compiler: str) -> Path:
    """The compiled interface, from the cache folder or compiled anew.

    Raises:
        RuntimeError: the compiler fails.
        OSError: there is none, or the folder cannot be written.
    """
    interface = _INTERFACE.read_text(encoding="utf-8").replace(_MESSAGE, _KEPT_MESSAGE)
    text = _device_names() + _PRECEDING + interface
    parts = [torch.__version__, platform.machine(), compiler, *_FLAGS, text]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cached_file("programs", f"interface-{key}.o")
    if not path.exists():
        with locked(path):
            if not path.exists():
                _compile(compiler, text, path)
    return path


def _compile(compiler: str, text: str, path: Path) -> None:
    """Compiles the interface to a file, which appears under its name once it is complete."""
    from torch.utils.cpp_extension import include_paths

    includes = [f"-I{each}" for each in include_paths()]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "interface.cpp")
        source.write_text(text, encoding="utf-8")
        scratch = path.with_suffix(f".{os.getpid()}.o")
        command = [compiler, "-c", *_FLAGS, *includes, str(source), "-o", str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        scratch.unlink(missing_ok=True)
        raise RuntimeError(f"{compiler} cannot compile the interface of programs: {done.stderr}")
    scratch.replace(path)


def _shortened(unit: Path) -> Path | None:
    """A copy of a unit without the interface; None if the unit does not have it. The unit itself
    stays as it is: Inductor does not write it again for another program with the same text."""
    text, interface = unit.read_text(encoding="utf-8"), _INTERFACE.read_text(encoding="utf-8")
    if interface.strip() not in text:
        return None
    shortened = unit.with_suffix(".short.cpp")
    scratch = shortened.with_suffix(f".{os.getpid()}.cpp")
    shorter = text.replace(interface.strip(), _INCLUDES)
    scratch.write_text(_device_names() + shorter, encoding="utf-8")
    return scratch.replace(shortened)


@cache
def _device_names() -> str:
    """What a unit begins with, unless torch's header is not the one that it is for."""
    model = _MODEL.read_text(encoding="utf-8")
    if _PATTERN not in model or (model.count("std::regex"), model.count("smatch")) != (2, 1):
        return ""
    return _DEVICE_NAMES.read_text(encoding="utf-8")
