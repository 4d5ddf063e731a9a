"""What a program may use, and the POSIX resource limits that hold it to that.

Imports the standard library only: the new process imports this file before it is confined.
"""

import contextlib
import math
import resource
from dataclasses import dataclass

MiB = 2**20


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        wall_seconds: from start to verdict, the start of Python included.
        cpu_seconds: of processor time.
        memory: bytes of address space.
        file_size: bytes of one file.
        total_size: bytes of all files together.
        num_files: files and folders.
        num_open: files open at the same time.
    """

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory: int = 1024 * MiB
    file_size: int = 4 * MiB
    total_size: int = 16 * MiB
    num_files: int = 256
    num_open: int = 64


def apply(limits: Limits) -> None:
    """Limits this process, for good. A limit that the system does not have is left out."""
    cpu = math.ceil(limits.cpu_seconds)
    _set("RLIMIT_CORE", 0)
    _set("RLIMIT_AS", limits.memory)
    _set("RLIMIT_FSIZE", limits.file_size)
    _set("RLIMIT_NOFILE", limits.num_open)
    _set("RLIMIT_NPROC", 0)
    _set("RLIMIT_CPU", cpu, cpu + 1)  # SIGXCPU, and SIGKILL for a program that ignores it


def _set(name: str, value: int, hard: int | None = None) -> None:
    number = getattr(resource, name, None)
    if number is None:
        return
    with contextlib.suppress(ValueError, OSError):  # macOS has RLIMIT_AS and does not accept it
        resource.setrlimit(number, (value, value if hard is None else hard))
