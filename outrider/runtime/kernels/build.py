"""Compiles the kernels once per kind of processor and version of torch, and loads them.

There are two libraries: that of all operators, and that of weights of few bits, which is compiled
and loaded with the first model that has any. They lie in the cache folder
(``runtime/cached_files.py``) under a hash of all that they were compiled from.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

from outrider.cache_folder import cache_folder
from outrider.core.errors import KernelError, OutriderWarning
from outrider.runtime.cached_files import cached_file, locked, space_note
from outrider.runtime.kernels.operators import define_operators
from outrider.runtime.kernels.processors import PORTABLE, processor

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_Units = tuple[tuple[str, ...], ...]

_KERNELS: _Units = (
    ("attend", "elementwise", "tensor", "truncate"),
    ("linear", "exact_mode", "move_slots", "operators", "program", "shims"),
)
"""Names of the sources that are compiled together. Two units that take about as long as each other
keep two cores busy, and each reads torch's headers once."""

_FEW_BITS: _Units = (("few_bits",),)

_SCRATCH = ".scratch"  # folders in which a library is compiled, under its lock

_few_bits_are_loaded = False


def load_kernels(*, few_bits: bool = False) -> bool:
    """Makes ``torch.ops.outrider`` available, compiling the kernels first if necessary.

    Args:
        few_bits: whether for weights of 8 or 4 bits in groups, too.

    Returns:
        Whether they were compiled just now.

    Raises:
        KernelError: no C++ compiler, or one that fails.
    """
    global _few_bits_are_loaded
    libraries = []
    if not kernels_are_loaded():
        _warn_of_portable_code()
        libraries.append((_kernels(), _KERNELS))
    if few_bits and not _few_bits_are_loaded:
        libraries.append((_kernels("-few-bits"), _FEW_BITS))
    with ThreadPoolExecutor() as pool:
        compiling = [pool.submit(_compile_missing, *each) for each in libraries]
    compiled = [each.result() for each in compiling]
    for library, _ in libraries:
        _load(library)
    define_operators()
    _few_bits_are_loaded |= few_bits
    return any(compiled)


def _compile_missing(library: Path, units: _Units) -> bool:
    """Compiles a library that is missing; returns whether it did."""
    if library.exists():
        return False
    try:
        with locked(library):
            if not library.exists():
                compile_kernels(library, units)
    except OSError as error:
        raise KernelError(f"cannot compile the kernels to {library.parent}: {error}") from error
    return True


def _load(library: Path) -> None:
    try:
        # global: programs look up the shims in it, and the second library the first one
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise KernelError(f"cannot load {library}: {error}; delete it to compile anew") from error


def _warn_of_portable_code() -> None:
    """Warns where the kernels have no instructions for the processor's vectors, unless the user
    asked torch for none."""
    if processor() is PORTABLE and "ATEN_CPU_CAPABILITY" not in os.environ:
        capability = torch.backends.cpu.get_cpu_capability()
        warnings.warn(
            f"the kernels know AVX2 and AVX512, and torch reports {capability} on "
            f"this {platform.machine()} processor: they run as portable code, which is slower",
            OutriderWarning,
            stacklevel=3,
        )


def kernels_are_missing() -> bool:
    """Whether loading the kernels compiles them."""
    return not (kernels_are_loaded() or _kernels().exists())


def compile_missing_kernels() -> None:
    """Compiles the kernels if they are missing, without loading them.

    Raises:
        KernelError: no C++ compiler, or one that fails.
    """
    if kernels_are_missing():
        _compile_missing(_kernels(), _KERNELS)


def others_compile_kernels() -> bool:
    """Whether another process can compile the kernels for this one: there is a compiler, and they
    lie where both processes look for them."""
    return find_compiler() is not None and _kernels().is_relative_to(cache_folder())


def _kernels(kind: str = "") -> Path:
    return cached_file("kernels", f"{kernels_key()}{kind}.so")


def kernels_are_loaded() -> bool:
    """Whether ``torch.ops.outrider`` has the kernels."""
    return hasattr(torch.ops.outrider, "linear")


def kernels_key() -> str:
    """A hash of all that the libraries are compiled from."""
    parts = [torch.__version__, sys.version, platform.machine(), *_flags()]
    parts += [path.read_text() for path in _read()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read() -> list[Path]:
    return sorted([*SOURCES, *SOURCES[0].parent.glob("*.h")])


def _flags() -> list[str]:
    here = processor()
    define = [] if here is PORTABLE else [f"-DCPU_CAPABILITY_{here.capability}"]
    return [
        *(here.optimisation, "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-w"),
        "-ffp-contract=off",  # products and sums are fused only where the code says so
        *(f"-DCPU_CAPABILITY={here.capability}", "-DAT_PARALLEL_OPENMP=1", *define),
        f"-DOUTRIDER_TILES_FROM={here.tiles_from}",
        f"-DOUTRIDER_GROUPS_FROM={here.groups_from}",
        f"-DOUTRIDER_FOLDED_FROM={here.folded_from}",
        *here.flags,
    ]


def find_compiler() -> str | None:
    """The C++ compiler: ``CXX``, else ``g++``, else ``clang++``; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compile_kernels(library: Path, units: _Units = _KERNELS) -> None:
    """Compiles a library, which appears under its name once it is complete.

    Raises:
        KernelError: no C++ compiler, or one that fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise KernelError("no C++ compiler here: install g++ or clang++, or name one in CXX")
    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    folders = cpp_extension.library_paths()
    links = [*(f"-L{path}" for path in folders), "-lc10", "-ltorch_cpu", "-ltorch"]
    for left in library.parent.glob(f"{library.name}-*{_SCRATCH}"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
    scratch_folder = tempfile.TemporaryDirectory(
        prefix=f"{library.name}-", suffix=_SCRATCH, dir=library.parent
    )
    with scratch_folder as scratch, ThreadPoolExecutor() as pool:
        files = [Path(scratch, f"{names[0]}.cpp") for names in units]
        for file, names in zip(files, units, strict=True):
            sources = [Path(__file__).with_name(f"{name}.cpp") for name in names]
            file.write_text("".join(f'#include "{source}"\n' for source in sources))
        objects = [str(Path(scratch, file.stem)) for file in files]
        commands = [
            [compiler, "-c", *_flags(), *includes, str(file), "-o", compiled]
            for file, compiled in zip(files, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        whole = str(Path(scratch, "whole"))
        _run([compiler, *_flags(), *objects, "-o", whole, *links])
        os.replace(whole, library)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelError(f"cannot run the C++ compiler {command[0]}: {error}") from error
    if done.returncode:
        wrong = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        note = space_note(Path(command[-1]).parent)
        raise KernelError(f"{command[0]} cannot compile the kernels: {wrong[0].strip()}{note}")
