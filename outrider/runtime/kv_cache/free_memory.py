"""How much memory a device has left."""

import os
import time
from functools import lru_cache

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is to be had, in bytes; of a device that does not tell, more than can be."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return _available(int(20 * time.monotonic()))
    return 2**62


@lru_cache(maxsize=1)
def _available(moment: int) -> int:
    """That of the host, asked for once a moment: growing KV buffers ask for each layer."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvail"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
