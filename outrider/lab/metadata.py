"""When, where and with which settings a result was measured."""

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.lab.versions import versions
from outrider.runtime.hardware import hardware

__all__ = ["command_line", "hardware", "run_metadata"]


def run_metadata(**settings: Any) -> dict[str, Any]:
    """The date, hardware, threads and versions of a measurement, followed by its settings."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **settings,
    }


def command_line() -> str:
    """The command that this process runs, without the folder that its program is in."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        program = [Path(sys.argv[0]).name]
    else:
        program = ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])
