"""Admission: which rows may start, namely those whose KV buffers fit below ``max_memory``.

The KV buffers of a batch are a rectangle per model: R rows, the most there were at once since the
batch began, and S slots, the longest sequence when it is complete with the nodes of a draft after
it, rounded up as KV buffers grow. They are freed when the last row has left. A batch therefore
reserves

    Σ models' KV buffers of R × S                 what they grow to
    + their largest single tensor                 a KV buffer that grows is copied, one at a time
    + Σ models' KV buffers of the newcomers       prefilled apart, then copied into the batch's

The states of recurrent layers do not grow. They are reserved with their snapshots: two states per
row of the target, and one per forward pass of a draft (``runtime/kv_cache/recurrent.py``).

A row is admitted if that fits beside the reservations of the engine's other batches. The first
rows of a batch leave room for the next newcomer, if one is waiting.

A sequence is reserved at its full length, prompt and ``max_new_tokens``. In the tokens of a draft
model with a vocabulary of its own a sequence may be longer; there, ``STRETCH`` times the length is
reserved. Where a reservation was too low all the same, a :class:`MemoryBudget` holds the bound: a
KV buffer beyond it raises.

The prefix cache (``runtime/kv_cache/prefix.py``) takes what the reservations leave. A reservation
that needs its memory gets it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from outrider.core import Drafter
from outrider.core.errors import InvalidParameterError, OutOfMemoryError
from outrider.core.values import is_whole, shown
from outrider.engine.request import Request, Row
from outrider.runtime import HFModel
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.runtime.kv_cache.cache import rounded, size
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.runtime.kv_cache.prefix import PrefixCache

STRETCH = 4
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(size: int | str, name: str = "max_memory") -> int:
    """The bytes that a number or a string such as ``512MiB``, ``2GB`` or ``1.5G`` (GiB) stands for.

    Args:
        size: the number or string.
        name: how messages call it.

    Raises:
        InvalidParameterError: anything else, or less than a byte.
    """
    if isinstance(size, int) and is_whole(size) and size > 0:
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)((?:I?B)?)\s*", str(size).upper())
    if isinstance(size, str) and found is not None:
        number, unit, kind = found.groups()
        num_bytes = float(number) * (1000 if kind == "B" else 1024) ** _UNITS[unit]
        if 1 <= num_bytes < math.inf:
            return int(num_bytes)
    raise InvalidParameterError(
        f"{name}={shown(size)}: must be a number of bytes, such as 512MiB or 2GB"
    )


@dataclass(frozen=True)
class RowExtent:
    """Token counts that decide the size of a row's KV buffers, or the largest of several rows.

    Attributes:
        first: tokens of the sequence when the row is admitted.
        final: tokens of the sequence when it is complete.
        source: tokens that an encoder reads.
    """

    first: int = 0
    final: int = 0
    source: int = 0


class KVMemory:
    """The bytes that an engine's KV buffers may take, and the reservations of its running batches.

    Args:
        max_memory: bytes.
        target: the target.
        drafter: the drafter; its ``capabilities`` name its models, and how many slots after
            the sequence a draft of γ levels takes in them and in the target; besides, how many
            bytes a token takes in its state.
        num_speculative_tokens: γ.
        stretch: how many times longer a sequence may be in the draft models' tokens.
        prefixes: the engine's prefix cache; None without one.

    Attributes:
        reservations: of all batches, in whatever thread they run.
        lock: held from reading the reservations until a new one is made.
    """

    def __init__(
        self,
        max_memory: int,
        target: HFModel,
        drafter: Drafter[Any],
        num_speculative_tokens: int,
        stretch: int = 1,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.max_memory = max_memory
        self._prefixes = prefixes
        self.reservations: WeakKeyDictionary[Reservation, int] = WeakKeyDictionary()
        self.lock = RLock()
        able = drafter.capabilities
        own = [m for m in able.models if not (isinstance(target, EarlyExit) and m is target.first)]
        self._nodes = able.max_nodes(num_speculative_tokens)
        self._models = [(target, Footprint.of(target, self._nodes))]
        self._models += [(model, Footprint.of(model, self._nodes, self._nodes)) for model in own]
        self._stretches = [1, *[stretch] * len(own)]
        if able.slot_bytes:
            self._models.append((target, Footprint(able.slot_bytes, 0, able.slot_bytes)))
            self._stretches.append(1)
        self._limit = target.limit
        self.leave_rest_to_prefixes()

    def leave_rest_to_prefixes(self) -> None:
        """Limits the prefix cache to the memory that is not reserved."""
        if self._prefixes is not None:
            self._prefixes.leave(max(0, self.max_memory - sum(self.reservations.values())))

    def extent(self, request: Request, num_emitted: int = 0) -> RowExtent:
        """The token counts of a request that has emitted so many tokens."""
        first = len(request.first_ids)
        final = min(first + request.sampling.max_new_tokens, self._limit)
        source = 0 if request.decoder_prompt is None else len(request.prompt_ids)
        return RowExtent(first + num_emitted, final, source)

    def check(self, request: Request) -> None:
        """Raises OutOfMemoryError for a request that does not fit alone."""
        extent = self.extent(request)
        wanted = self.final(1, extent)
        if wanted > self.max_memory:
            raise OutOfMemoryError(
                f"a prompt of {len(request.prompt_ids)} tokens with up to "
                f"{extent.final - extent.first} new ones needs {_exactly(wanted)} of KV buffers, "
                f"and max_memory is {_exactly(self.max_memory)}: raise it, lower max_new_tokens, "
                f"shorten the prompt, or store KV buffers with kv_dtype='int8'"
            )

    def final(self, rows: int, extent: RowExtent) -> int:
        """Bytes of a batch when its sequences are complete, the copy of one tensor included."""
        shapes = self._shapes(extent.final, extent.source, self._nodes)
        copies = [footprint.plane * rows * slots for footprint, slots, _ in shapes]
        return _bytes(rows, shapes) + max(copies)

    def first(self, rows: int, extent: RowExtent) -> int:
        """Bytes of newcomers before they join."""
        return _bytes(rows, self._shapes(extent.first, extent.source, 0))

    def exhausted(self) -> OutOfMemoryError:
        """The error for a row that does not fit although no row of its scheduler runs."""
        return OutOfMemoryError(
            f"{_exactly(sum(self.reservations.values()))} of max_memory, "
            f"{_exactly(self.max_memory)}, are reserved by rows of another scheduler of this "
            f"engine: let them end, raise max_memory, or lower max_new_tokens"
        )

    def _shapes(self, num_tokens: int, source: int, nodes: int) -> list[tuple[Footprint, int, int]]:
        """Slots of sequence and source that each model's KV buffers have."""
        shapes = []
        for (model, footprint), stretch in zip(self._models, self._stretches, strict=True):
            most = model.limit + max(MARGIN, self._nodes)
            slots = min(stretch * num_tokens, model.limit) + nodes
            slots = min(rounded(slots, model.device), most)
            shapes.append((footprint, slots, min(stretch * source, model.limit)))
        return shapes


class Reservation:
    """The bytes that one batch has reserved.

    Args:
        memory: the memory that they are reserved in.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._rows = 0
        self._extent = RowExtent()

    def admit(self, running: int, waiting: Sequence[Row], most: int) -> int:
        """Reserves memory for as many of the waiting rows as fit, in their order; their number."""
        extents = [self._memory.extent(row.request, len(row.token_ids)) for row in waiting]
        with self._memory.lock:
            count = self._fitting(running, extents, most)
            if count:
                self._memory.reservations[self] = self._bytes(running, extents[:count])
                self._memory.leave_rest_to_prefixes()
        if count:
            self._rows, self._extent = self._with(running, extents[:count])
        return count

    def clear(self) -> None:
        """Gives back everything: the last row has left."""
        with self._memory.lock:
            if self in self._memory.reservations:
                self._memory.reservations[self] = 0
                self._memory.leave_rest_to_prefixes()
        self._rows, self._extent = 0, RowExtent()

    def _fitting(self, running: int, extents: Sequence[RowExtent], most: int) -> int:
        others = sum(
            n for reservation, n in self._memory.reservations.items() if reservation is not self
        )
        left = self._memory.max_memory - others
        count = 0
        while count < min(most, len(extents)) and self._fits(running, extents, count + 1, left):
            count += 1
        return count

    def _fits(self, running: int, extents: Sequence[RowExtent], count: int, left: int) -> bool:
        wanted = self._bytes(running, extents[:count])
        if not running and 1 < count < len(extents):
            wanted += self._memory.first(1, extents[count])
        return wanted <= left

    def _bytes(self, running: int, newcomers: Sequence[RowExtent]) -> int:
        final = self._memory.final(*self._with(running, newcomers))
        if not running:
            return final
        return final + self._memory.first(len(newcomers), _largest(newcomers))

    def _with(self, running: int, newcomers: Sequence[RowExtent]) -> tuple[int, RowExtent]:
        """Rows and longest sequence of the batch's KV buffers, once these rows have joined."""
        return max(self._rows, running + len(newcomers)), _largest([self._extent, *newcomers])


def _exactly(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({size(num_bytes)})"


def _bytes(rows: int, shapes: Sequence[tuple[Footprint, int, int]]) -> int:
    return sum(footprint.bytes(rows, slots, source) for footprint, slots, source in shapes)


def _largest(extents: Sequence[RowExtent]) -> RowExtent:
    return RowExtent(
        max(extent.first for extent in extents),
        max(extent.final for extent in extents),
        max(extent.source for extent in extents),
    )
