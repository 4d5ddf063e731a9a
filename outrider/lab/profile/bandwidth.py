"""Measures how fast this machine reads memory, with as many threads as the engine uses.

A forward pass over one token reads every weight once and computes little with it, so its bytes
divided by the bandwidth are the least time that it can take. The bandwidth is measured by a sum
over one large tensor, which only reads, in order. A matrix-vector product, of which a pass mostly
consists, is timed too: if it is slower than the sum, the library is the limit, not the memory.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LARGE = 512 * 2**20
_REPEATS = 9
_COLUMNS = 4096
_LEVELS = "/sys/devices/system/cpu/cpu0/cache"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Bandwidth:
    """Measured read bandwidth, in bytes per second.

    Attributes:
        num_bytes: size of the working set.
        median, lowest, highest: bandwidth of the sum over the repeats.
        matrix_vector: median bandwidth of the matrix-vector product over the same bytes.
    """

    num_bytes: int
    median: float
    lowest: float
    highest: float
    matrix_vector: float

    def as_dict(self) -> dict[str, Any]:
        """The measurement as a JSON document."""
        return asdict(self)


def read_bandwidth(
    device: torch.device, num_bytes: int = LARGE, repeats: int = _REPEATS
) -> Bandwidth:
    """Times repeated sums over ``num_bytes`` of float32.

    After the warm-up, a working set that fits into a cache is read from the cache. This measures
    how fast a model of that size could be read.
    """
    rows = max(1, num_bytes // (4 * _COLUMNS))
    matrix = torch.ones(rows, _COLUMNS, device=device)
    vector = torch.ones(_COLUMNS, device=device)
    with torch.inference_mode():
        sums = [matrix.nbytes / s for s in _times(matrix.sum, device, repeats)]
        products = [matrix.nbytes / s for s in _times(lambda: matrix @ vector, device, repeats)]
    return Bandwidth(
        matrix.nbytes, statistics.median(sums), min(sums), max(sums), statistics.median(products)
    )


def last_level_cache(device: torch.device) -> int | None:
    """Size of the last-level cache in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type != "cpu":
        return None
    sizes = {}
    try:
        for folder in Path(_LEVELS).glob("index*"):
            text = (folder / "size").read_text(encoding="ascii").strip()
            level = int((folder / "level").read_text(encoding="ascii"))
            sizes[level] = int(text.rstrip("KMG")) * _UNITS.get(text[-1], 1)
    except (OSError, ValueError):
        return None
    return sizes[max(sizes)] if sizes else None


def _times(work: Callable[[], Tensor], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call after two calls of warm-up; on a GPU, measured by events."""
    times = [_timed(work, device) for _ in range(repeats + 2)]
    return times[2:]


def _timed(work: Callable[[], Tensor], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000
