"""How fast this machine reads memory, with as many threads as the engine uses.

A pass over one token reads every weight once and does next to nothing with it, so bytes ÷ bandwidth
is the least time that it can take. What is timed is a sum over one large tensor: reading alone, in
order, as much as the cores ask for. A matrix-vector product, which is what a pass consists of, is
timed beside it: where it is slower, the library is, not the memory.
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
    """Bytes per second, read from a working set of so many bytes; median, least and most.

    Attributes:
        num_bytes: of the tensor.
        median, lowest, highest: of the sum.
        matrix_vector: median of the matrix-vector product over the same bytes.
    """

    num_bytes: int
    median: float
    lowest: float
    highest: float
    matrix_vector: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_bandwidth(
    device: torch.device, num_bytes: int = LARGE, repeats: int = _REPEATS
) -> Bandwidth:
    """Times a sum over ``num_bytes`` of float32, again and again.

    A working set that fits into a cache is read from there after the first time, which is not
    counted: so it is known how fast a model that fits could be read.
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
    """Bytes of the cache next to memory; None where the system does not say."""
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
    """Seconds of each call, the first two not counted; on a GPU by events."""
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
