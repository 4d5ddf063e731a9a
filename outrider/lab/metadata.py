"""When, where and with which settings a result was measured."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.lab.versions import versions
from outrider.runtime.hardware import hardware

__all__ = ["command_line", "hardware", "instructions", "run_metadata"]

NARROW = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "i8mm")
"""Instruction sets of 8- and 16-bit numbers, as Linux calls them."""


def run_metadata(**settings: Any) -> dict[str, Any]:
    """The date, hardware, instruction sets, threads and versions of a measurement, followed by
    its settings."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "instructions": ", ".join(instructions()),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **settings,
    }


def instructions() -> list[str]:
    """The vector level that torch uses, and the processor's 8- and 16-bit instruction sets, which
    processors of the same name may have or lack."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        words = set()
    return [torch.backends.cpu.get_cpu_capability(), *(name for name in NARROW if name in words)]


def command_line() -> str:
    """The command that this process runs, without the folder that its program is in."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        program = [Path(sys.argv[0]).name]
    else:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])
