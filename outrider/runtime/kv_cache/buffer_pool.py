"""KV buffers of caches that are gone, kept for the next ones.

A CUDA graph reads and writes KV buffers at the addresses that it was captured with. Each request or
batch has a new cache; with buffers at new addresses, every graph would be captured anew, which
takes longer than many rounds. So a buffer returns to its place in the model, its layer and whether
it holds keys or values, and the next cache of as many rows and slots finds all of its buffers where
an earlier one had them.
"""

from collections import OrderedDict
from threading import RLock

import torch
from torch import Tensor

from outrider.runtime.kv_cache.prefix import Planes

Place = tuple[int, int]
"""Plane and layer of a buffer."""

Key = tuple[object, ...]


class BufferPool:
    """The free KV buffers of a model. May be used from several threads.

    Args:
        max_bytes: most bytes that the free buffers take; those that are free for longest are
            dropped first. By default a sixteenth of a GPU's memory, and none of a CPU's.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._free: OrderedDict[Key, list[Tensor]] = OrderedDict()
        self._num_bytes = 0
        self._lock = RLock()

    def take(self, place: Place, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
        """A buffer of this shape from this place, filled with zeros, of the dtype and device of
        ``like``; None if none is free."""
        with self._lock:
            free = self._free.get((*place, shape, like.dtype, like.device))
            if not free:
                return None
            buffer = free.pop()
            self._num_bytes -= buffer.nbytes
        return buffer.zero_()

    def give(self, place: Place, buffer: Tensor) -> None:
        """Frees a buffer, which nobody reads any more."""
        key = *place, tuple(buffer.shape), buffer.dtype, buffer.device
        with self._lock:
            if self.max_bytes is None:
                self.max_bytes = _share_of_memory(buffer.device)
            self._free.setdefault(key, []).append(buffer)
            self._free.move_to_end(key)
            self._num_bytes += buffer.nbytes
            while self._num_bytes > self.max_bytes:
                self._drop_oldest()

    def give_all(self, planes: Planes) -> None:
        """Frees the buffers of a cache."""
        for plane, buffers in enumerate(planes):
            for layer, buffer in enumerate(buffers):
                if buffer is not None:
                    self.give((plane, layer), buffer)

    def clear(self) -> None:
        """Drops all free buffers."""
        with self._lock:
            self._free.clear()
            self._num_bytes = 0

    def _drop_oldest(self) -> None:
        key = next(iter(self._free))
        buffers = self._free[key]
        self._num_bytes -= buffers.pop(0).nbytes
        if not buffers:
            del self._free[key]


def _share_of_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory // 16
