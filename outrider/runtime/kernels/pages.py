"""Memory in pages of two megabytes, where the system has them. A forward pass reads every weight
once, and with small pages it would have to translate thousands of addresses.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor, nn

_PAGE = 2**21


class Pages:
    """Large memory pages, filled one weight after the other."""

    _CHUNK = 2**25

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def parameter(self, weight: Tensor) -> nn.Parameter:
        """A copy of the weight in these pages."""
        size = -(-weight.nbytes // 64) * 64
        if size > self._free.numel():
            self._free = _map(max(size, self._CHUNK))
        place, self._free = self._free[: weight.nbytes], self._free[size:]
        return nn.Parameter(place.view(weight.dtype).view(weight.shape).copy_(weight), False)


def _map(num_bytes: int) -> Tensor:
    """A tensor of so many bytes (uint8) at the beginning of a page."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    size = -(-num_bytes // _PAGE) * _PAGE + _PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without such pages refuses the advice, or ignores it
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    first = -mapped.data_ptr() % _PAGE
    return mapped[first : first + num_bytes]
