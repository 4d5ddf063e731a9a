"""What a process's resident memory consists of.

Tensors grow and shrink with the batch: a KV buffer has a power of two of slots, and is as long as
its longest sequence needs. The allocator keeps freed memory for later. Neither is a leak. A leak is
memory in use that belongs to no tensor that Python knows, or more such tensors from batch to batch.
"""

import ctypes
import gc
import os
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

_MIB = 2**20


class MemoryInUse(NamedTuple):
    """A reading, in MiB.

    Attributes:
        resident: of the process.
        tensors: the storage of all tensors that Python knows.
        other: what else the allocator has given away and not got back; NaN where the C library does
            not tell.
    """

    resident: float
    tensors: float
    other: float

    @classmethod
    def read(cls) -> "MemoryInUse":
        """The present state, after a garbage collection."""
        gc.collect()
        tensors = _tensor_bytes() / _MIB
        return cls(_resident_bytes() / _MIB, tensors, _allocated_bytes() / _MIB - tensors)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _tensor_bytes() -> int:
    storages: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            with suppress(RuntimeError):  # left over from a trace, without data
                storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _allocated_bytes() -> float:
    tell = _mallinfo2()
    if tell is None:
        return float("nan")
    found = tell()
    return float(found.uordblks + found.hblkhd)


@cache
def _mallinfo2() -> Any:
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is not None:
        tell.restype = _MallocInfo
    return tell
