"""The kernel for matrix units (AMX) computes what it should: by emulated blocks on any processor
with AVX-512, and by the unit itself where there is one."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from outrider.runtime.kernels import build, processors

KERNELS = Path(build.__file__).parent
PROGRAM = Path(__file__).parent / "tiles.cpp"

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


AVX512_ONLY = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="panels have 32 outputs there"
)


def compiled(program: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Compiles the program."""
    includes = [f"-I{path}" for path in (KERNELS, *cpp_extension.include_paths())]
    command = [str(build.find_compiler()), "-std=c++20", "-w", str(program), "-o", str(out)]
    command += ["-DOUTRIDER_TILES_FROM=2", "-DOUTRIDER_FOLDED_FROM=2", *includes, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_program(program: Path, tmp_path: Path, *more: str) -> None:
    """Compiles and runs a program. All its numbers are small integers, so that every order of
    sums is exact."""
    libraries = cpp_extension.library_paths()
    links = [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    links += ["-lc10", "-ltorch_cpu", "-ltorch", "-fopenmp"]
    out = tmp_path / "tiles"
    capability = "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"
    done = compiled(program, out, *capability, *more, *links)
    assert done.returncode == 0, done.stderr[-3000:]
    ran = subprocess.run([str(out)], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("right", 0)


@AVX512_ONLY
def test_blocks_add_up_to_the_products(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path, *processors.AVX512.flags, "-DOUTRIDER_EMULATED_TILES")


@pytest.mark.skipif(
    processors.processor() is not processors.AMX, reason="no matrix unit on this processor"
)
@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
def test_the_matrix_unit_computes_the_products(tmp_path: Path, optimisation: str) -> None:
    """With optimisation, too: the compiler does not know what the unit's loads read."""
    run_program(PROGRAM, tmp_path, *processors.AMX.flags, optimisation)


def test_the_kernel_compiles_for_matrix_units(tmp_path: Path) -> None:
    defines = ["-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512", "-c"]
    out = tmp_path / "tiles.o"
    done = compiled(PROGRAM, out, *processors.AMX.flags, *defines)
    if "unrecognized" in done.stderr or "unknown argument" in done.stderr:
        pytest.skip(f"the compiler does not know them: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr[-3000:]
