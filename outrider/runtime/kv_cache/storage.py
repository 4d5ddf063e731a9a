"""How KV buffers store numbers: as the model computes them, in bfloat16, or in int8 with scales.

A vector x is the key or the value of one token in one head of one layer; x̂ is what is read back.

    auto       x̂ = x
    bfloat16   x̂ = x rounded to 8 significant bits:             |x̂ - x| ≤ 2^-8 |x|, each number
    int8       s = max|x| / 127,  n = round(x / s),  x̂ = s n:   |x̂ - x| ≤ s / 2 = max|x| / 254

The bound of int8 holds up to rounding in float32, 2^-22 max|x|, and for vectors whose scale is a
normal float32 number. int8 with one scale per vector is the absmax quantisation of Dettmers et al.,
"LLM.int8()", NeurIPS 2022, section 2. The scale is a float32 number beside the vector, so a vector
of width C takes C + 4 bytes. Reading returns the model's dtype, with one more rounding to it.

A lower precision changes the model: its distributions become those of the model with these KV
buffers. For a target this changes the distribution that is sampled, and ``lossless`` then refers to
the target with its KV buffers. For a draft model it does not: verification corrects any draft.

Every token's vector is stored by itself, whatever is stored with it, so batches, trees and rollback
change nothing. But rounding is a step function: where two forward passes differ in the last bit, as
passes of different width do, a number now and then falls on the other side of a step.

Legend: B rows, H heads, N query tokens of a forward pass, S slots, C width of a head.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from typing import TYPE_CHECKING, Literal, Protocol, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from outrider.core.values import check_choice
from outrider.runtime.host_memory import available_bytes

if TYPE_CHECKING:
    from outrider.runtime.kv_cache.buffer_pool import BufferPool

KvDtype = Literal["auto", "bfloat16", "int8"]


class Storage(Protocol):
    """A way to store vectors.

    Attributes:
        planes: how many tensors it takes; the first holds the numbers.
    """

    @property
    def planes(self) -> int: ...

    def encode(self, x_BHNC: Tensor) -> tuple[Tensor, ...]:
        """The tensors to store, one (B, H, N, ·) per plane."""

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The vectors that the planes stand for, (B, H, S, C)."""


class _Plain:
    planes = 1

    def encode(self, x_BHNC: Tensor) -> tuple[Tensor, ...]:
        return (x_BHNC,)

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return planes[0]


class _Bfloat16:
    planes = 1

    def encode(self, x_BHNC: Tensor) -> tuple[Tensor, ...]:
        return (x_BHNC.bfloat16(),)

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return planes[0].to(dtype)


class _Int8:
    planes = 2

    def encode(self, x_BHNC: Tensor) -> tuple[Tensor, ...]:
        """Numbers and scales. A vector that is not finite gets a scale that is not, and is read
        back as NaN."""
        x_BHNC = x_BHNC if x_BHNC.dtype == torch.float64 else x_BHNC.float()
        scale_BHN1 = x_BHNC.abs().amax(-1, keepdim=True).div(127).float()
        scale_BHN1 = scale_BHN1.clamp(min=torch.finfo(torch.float32).tiny)
        return x_BHNC.div(scale_BHN1).round_().clamp_(-127, 127).to(torch.int8), scale_BHN1

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        number_BHSC, scale_BHS1 = planes
        return (number_BHSC * scale_BHS1).to(dtype)


_STORAGES: dict[str, Storage] = {"auto": _Plain(), "bfloat16": _Bfloat16(), "int8": _Int8()}


class MemoryBudget:
    """The most memory that the KV buffers of several caches may take together.

    Args:
        num_bytes: the bound.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._caches: WeakSet[HoldsKVBuffers] = WeakSet()
        self._lock = RLock()

    def share(self, cache: "HoldsKVBuffers") -> None:
        """Counts the KV buffers of a cache for as long as the cache lives."""
        with self._lock:
            self._caches.add(cache)

    def held(self) -> int:
        """Bytes that the KV buffers take now."""
        with self._lock:
            return sum(cache.own_bytes() for cache in self._caches)


class HoldsKVBuffers(Protocol):
    """What a memory budget needs of a cache."""

    def own_bytes(self) -> int:
        """Bytes of its own KV buffers, without those of caches inside it."""


@dataclass(frozen=True)
class KVCachePlan:
    """How a model's caches store numbers, and how much memory they may take.

    Attributes:
        kv_dtype: ``auto``, ``bfloat16`` or ``int8``.
        memory_budget: shared with other caches; None sets no bound.
        pool: where caches get KV buffers from, and leave theirs; None for new ones.

    Raises:
        InvalidParameterError: another ``kv_dtype``.
    """

    kv_dtype: KvDtype = "auto"
    memory_budget: MemoryBudget | None = None
    pool: "BufferPool | None" = None

    def __post_init__(self) -> None:
        check_kv_dtype(self.kv_dtype)

    @property
    def storage(self) -> Storage:
        return _STORAGES[self.kv_dtype]


def check_kv_dtype(kv_dtype: str) -> None:
    """Raises InvalidParameterError unless it is a value of ``KvDtype``."""
    check_choice("kv_dtype", kv_dtype, get_args(KvDtype))


@dataclass(frozen=True)
class KVLayout:
    """The shapes of a model's KV buffers, for :meth:`KVCache.reserve`.

    Attributes:
        shapes: number of heads, width of a key and width of a value, by layer.
        dtype: of the numbers, before they are encoded.
        device: where the KV buffers live.
    """

    shapes: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    device: torch.device


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
    return available_bytes()


def query_slots(length_B: Tensor, first: int, num_queries: int) -> Tensor:
    """The slots of query tokens after each row's committed ones, the first ``first`` of which
    earlier forward passes have filled, (B, N)."""
    step_N = torch.arange(first, first + num_queries, device=length_B.device)
    return length_B[:, None] + step_N


def write_at(buffer: Tensor, rows_B1: Tensor, slots_BN: Tensor, new_BHNC: Tensor) -> None:
    """Writes keys or values to each row's own slots of a KV buffer (B, H, S, C), in place."""
    buffer[rows_B1, :, slots_BN] = new_BHNC.transpose(1, 2)
