"""How much memory a device has left."""

import os
import time
from functools import lru_cache

import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated. Of a device that cannot tell, a number beyond any
    memory."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return _available(int(20 * time.monotonic()))
    return 2**62


@lru_cache(maxsize=1)
def _available(moment: int) -> int:
    """Free memory of the host. Read once per twentieth of a second (``moment``), since growing KV
    buffers ask for every layer."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvail"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
