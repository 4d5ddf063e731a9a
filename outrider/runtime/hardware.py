"""The names of the hardware, as reports and tables of measured times give them, and as programs
compiled for it are told apart."""

import platform
from functools import cache
from pathlib import Path

import torch


def hardware() -> str:
    """The name of the GPU, or of the processor if there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()


@cache
def processor_name() -> str:
    """The name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()
