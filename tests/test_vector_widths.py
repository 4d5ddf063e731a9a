"""Runs tests that depend on the processor's vector width again at each narrower width.

torch, the kernels and the code generator follow ``ATEN_CPU_CAPABILITY``, which is read once per
process, so each width gets its own pytest run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
WIDTHS = ("default", "avx2", "avx512")
MARK = "vector_width"
LOOPS = "vector_loops"


def narrower_widths() -> tuple[str, ...]:
    """The vector widths narrower than that of this process."""
    own = torch.backends.cpu.get_cpu_capability().lower()
    return WIDTHS[: WIDTHS.index(own)] if own in WIDTHS else ()


def marked_files() -> list[str]:
    """Files with tests to run at every width."""
    here = Path(__file__)
    files = (path for path in ROOT.glob("tests/**/test_*.py") if path != here)
    return sorted(
        str(path.relative_to(ROOT)) for path in files if f"mark.{MARK}" in path.read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", narrower_widths())
def test_passes_at_narrower_widths(width: str) -> None:
    """One process for all files of a width: importing the libraries takes ten seconds. Without
    vectors one program is compiled, to run the kernels of that width."""
    marked = f"{MARK} and not {LOOPS}" if width == WIDTHS[0] else MARK
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked]
    command += marked_files()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"ATEN_CPU_CAPABILITY": width},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_there_is_something_to_run() -> None:
    assert "tests/runtime/test_kernels.py" in marked_files()
    assert "tests/runtime/test_exact_arithmetic.py" in marked_files()
