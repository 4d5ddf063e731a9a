"""The KV cache: preallocated buffers, written at per-row slots, rolled back by moving a counter.

A KV buffer holds one layer's keys (or values) of all rows, ``(rows, heads, slots, width)``. The
tokens of a row fill its slots from 0 on. A forward pass writes its query tokens after them; those
that the cache does not keep are overwritten by the next forward pass. KV buffers grow by doubling,
up to the model's context.

``storage.py`` says how numbers are stored. It splits a KV buffer into planes, tensors
``(rows, heads, slots, ·)``: one of numbers and, where numbers are quantised, one of scales.

Legend: B rows, N query tokens of a forward pass, S slots, D depth, H heads, C width of a head.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self
from weakref import finalize

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.core.context import Context
from outrider.core.errors import OutOfMemoryError
from outrider.core.health import Health
from outrider.core.lengths import Lengths, Sequences
from outrider.runtime.kernels.move_slots import move_slots
from outrider.runtime.kv_cache.buffer_pool import Place
from outrider.runtime.kv_cache.prefix import ModelPrefixes, Planes
from outrider.runtime.kv_cache.storage import (
    KVCachePlan,
    KVLayout,
    free_bytes,
    query_slots,
    write_at,
)

PLAIN = KVCachePlan()
_FIRST_SLOTS = {"cuda": 256}
"""Fewest slots of a KV buffer, where these are not 64: each size has CUDA graphs of its own."""


class KVCache(Cache, Sequences):
    """The keys and values of a batch: a ``core.SequenceState``, and a drop-in for the caches of
    ``transformers``.

    ``lengths`` and ``length_B`` count the committed slots per row. Only :meth:`append`,
    :meth:`select`, :meth:`rollback`, :meth:`restore`, :meth:`keep` and :meth:`join` change them.

    Args:
        context: the batch it belongs to.
        num_layers: attention layers of the model.
        limit: most slots per row, the model's context.
        plan: how KV buffers store numbers, and how much memory they may take.
        granted: bytes of all KV buffers for which nobody asks how much memory is free.

    Attributes:
        is_plain: whether KV buffers hold numbers as the model computes them.
        keys: by layer, the numbers as they are stored, (B, H, S, C); None before the first pass.
        values: the same for values.
        long: which rows have keys with long rotary factors (``longrope.py``).
        health: where forward passes record whether their logits were finite. The context's, once
            the prompts are cached.
        span: slots that the forward pass under way reads, its own query tokens included.
        prefixes: what retains the rows that leave (``prefix.py``); None if nothing does.
    """

    is_compileable = False
    cuts_back = True
    can_lead = True
    """Whether forward passes can be over the first rows alone (:meth:`leading`)."""
    prefixes: ModelPrefixes | None = None

    def __init__(
        self,
        context: Context,
        num_layers: int,
        limit: int,
        plan: KVCachePlan = PLAIN,
        granted: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.context = context
        self.limit = limit
        self.sequence_lengths = Lengths([0] * context.num_rows, torch.zeros_like(context.length_B))
        self.long = [False] * context.num_rows
        self.plan = plan
        self.is_plain = plan.kv_dtype == "auto"
        self.health = Health()
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._sides = [_side(self.keys, plan), _side(self.values, plan)]
        if plan.memory_budget is not None:
            plan.memory_budget.share(self)
        if plan.pool is not None:
            finalize(self, plan.pool.give_all, self._own_planes()).atexit = False
        self.span = 0
        self._start: int | None = 0
        self._first = self._num_queries = 0
        self._slots: tuple[Tensor, Tensor] | None = None
        self._room = (0, 0)
        self._granted = granted  # bytes of all KV buffers that there was memory for
        self._in_use: tuple[int, list[Tensor]] = (0, [])

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length, so that a forward pass writes one slice."""
        return self._start is not None

    def begin(self, num_queries: int, first: int = 0, kept: Lengths | None = None) -> None:
        """Prepares for a forward pass that writes ``num_queries`` query tokens after the
        committed tokens, and after the ``first`` query tokens that earlier passes wrote there.

        Args:
            num_queries: query tokens of each row.
            first: query tokens of earlier passes.
            kept: how many each row is known to keep; None where :meth:`append` says so first. KV
                buffers do not depend on it.
        """
        lengths = self.sequence_lengths.host
        longest = max(lengths)
        self.span = longest + first + num_queries
        self._start = longest + first if min(lengths) == longest else None
        self._first, self._num_queries, self._slots = first, num_queries, None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Stores one layer's keys and values, (B, H, N, C), and returns all that the pass reads,
        (B, H, S, C). The model's attention calls it."""
        if self.is_plain:
            return (
                self._write(self.keys, layer_idx, key_states),
                self._write(self.values, layer_idx, value_states),
            )
        return (
            self._store(self._sides[0], layer_idx, key_states),
            self._store(self._sides[1], layer_idx, value_states),
        )

    def reserve(self, num_rows: int, num_slots: int, layout: KVLayout) -> None:
        """Allocates KV buffers ahead, so that forward passes up to that size neither grow nor copy
        them. Rounds slots up as growing does, and keeps what the buffers hold."""
        for layer, (heads, *widths) in enumerate(layout.shapes):
            for side, width in zip(self._sides, widths, strict=True):
                none = torch.empty(0, heads, 0, width, dtype=layout.dtype, device=layout.device)
                for buffers, like in zip(side, self.plan.storage.encode(none), strict=True):
                    self._grown(buffers, layer, like, num_rows, num_slots)

    def make_room(self) -> bool:
        """Grows the KV buffers to what the forward pass under way will read, since a compiled
        program cannot. False where a layer has no KV buffer yet: then the pass allocates it."""
        rows, slots = self._room
        if len(self.sequence_lengths.host) <= rows and self.span <= slots:
            return True
        for side in self._sides:
            for buffers in side:
                for layer, buffer in enumerate(buffers):
                    if buffer is None:
                        return False
                    self._grown(buffers, layer, buffer, self.num_rows, self.span)
        buffers_now = self._buffers()
        self._room = min(s.shape[0] for s in buffers_now), min(s.shape[2] for s in buffers_now)
        return True

    def in_use(self) -> list[Tensor]:
        """The tensors that compiled programs read and write: see ``executors/traced_cache.py``."""
        return self.own_in_use()

    def own_in_use(self) -> list[Tensor]:
        """The KV buffers of the sequences, keys then values, cut to the rows in use. The same list
        of tensors until the buffers grow or the number of rows changes."""
        rows, buffers = self._in_use
        num_rows = len(self.sequence_lengths.host)
        if rows != num_rows:
            buffers = [buffer[:num_rows] for buffer in self._buffers()]
            self._in_use = num_rows, buffers
        return buffers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.limit

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    def append(self, num: Lengths | int) -> None:
        """Keeps the next ``num`` query tokens of the last forward pass, per row or in all rows."""
        self.sequence_lengths = self.sequence_lengths + num

    def select(self, index_BD: Tensor, num_accepted: Lengths) -> None:
        """Keeps the root, query token 0 of the last forward pass, and the first
        ``num_accepted`` query tokens of a path, which are moved to the slots after it."""
        if most := max(num_accepted.host):
            self.pack(index_BD[:, :most], 1)
        self.append(num_accepted + 1)

    @contextmanager
    def leading(self, num: int) -> Iterator[None]:
        """Makes this the cache of the first rows alone within the context. The others stay as they
        are."""
        whole, long = self.sequence_lengths, self.long
        if num == len(long):
            yield
            return
        self.sequence_lengths, self.long = whole.keep(range(num)), long[:num]
        try:
            yield
        finally:
            others = whole.keep(range(num, len(long)))
            self.sequence_lengths = self.sequence_lengths.join(others)
            self.long = [*self.long, *long[num:]]

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` slots of each row; a row that has fewer keeps what
        it has."""
        self.sequence_lengths = self.sequence_lengths.at_most(lengths)

    def snapshot(self) -> Lengths:
        """The lengths, which are all that it takes to return to this state while rows only grow."""
        return self.sequence_lengths

    def restore(self, snapshot: Lengths) -> None:
        """Returns to a snapshot of the same rows, which have only grown since."""
        self.rollback(snapshot)

    def pack(self, index_BD: Tensor, first: int = 0) -> None:
        """Moves query tokens of the last forward passes to the slots ``first``, ``first + 1``, …
        after the committed ones. Positions that the keys encode and lengths stay as they are."""
        move_slots(self.own_in_use(), self.sequence_lengths, index_BD, first)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order (``rows[i] >= i``); the KV buffers stay allocated. Rows
        that have joined without a token may lie beyond the KV buffers, which have not grown yet."""
        if self.prefixes is not None:
            self.prefixes.retain(self, sorted(set(range(self.num_rows)).difference(rows)))
        for buffer in self._buffers():
            allocated = buffer.shape[0]
            for to, row in enumerate(rows):
                if to == row or to >= allocated:
                    continue
                if row < allocated:
                    buffer[to].copy_(buffer[row])
                else:
                    buffer[to].zero_()  # as in ``join``
        self.sequence_lengths = self.sequence_lengths.keep(rows)
        self.long = [self.long[row] for row in rows]

    def join(self, other: "KVCache") -> None:
        """Appends the rows of another cache.

        What former rows left in the slots after the newcomers' tokens is cleared: it may be NaN,
        and attention to a NaN is NaN even where the mask hides it.
        """
        first, total = self.num_rows, self.num_rows + other.num_rows
        used = max(other.lengths)
        for buffers, others in zip(self.planes(), other.planes(), strict=True):
            for layer, theirs in enumerate(others):
                mine = buffers[layer]
                if theirs is not None and used > 0:
                    slots = max(used, 0 if mine is None else mine.shape[2])
                    mine = self._grown(buffers, layer, theirs, total, slots)
                    mine[first:total, :, :used].copy_(theirs[: other.num_rows, :, :used])
                if mine is not None:
                    mine[first:total, :, used:].zero_()
        self.sequence_lengths = self.sequence_lengths.join(other.sequence_lengths)
        self.long = self.long + other.long

    def fill(self, row: int, planes: Planes, num: int, num_slots: int) -> None:
        """Writes the first ``num`` slots of a row of an empty cache, as another cache stored them.

        Args:
            row: the row.
            planes: tensors (H, S, ·) by plane and layer, as :meth:`planes` has them for all rows.
            num: how many slots to write. :meth:`append` then keeps them.
            num_slots: slots to allocate, at least ``num``.
        """
        for buffers, stored in zip(self.planes(), planes, strict=True):
            for layer, part in enumerate(stored):
                if part is not None:
                    grown = self._grown(buffers, layer, part[None], self.num_rows, num_slots)
                    grown[row, :, :num].copy_(part[:, :num])

    def row(self, index: int, context: Context) -> Self:
        """An empty cache over the memory of one row. This cache holds whatever the other writes.

        Args:
            index: the row.
            context: a batch of that row alone. Its cache must not come to hold more tokens than
                the row has here.
        """
        plan = KVCachePlan(self.plan.kv_dtype)
        view = type(self)(context, len(self.keys), self.limit, plan)
        for theirs, ours in zip(view.planes(), self.planes(), strict=True):
            theirs[:] = [None if buffer is None else buffer[index : index + 1] for buffer in ours]
        return view

    def num_bytes(self) -> int:
        """Bytes of all KV buffers."""
        return self.own_bytes()

    def own_bytes(self) -> int:
        """Bytes of this cache's own KV buffers, without those of caches inside it."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def planes(self) -> Planes:
        """The KV buffers, by plane (``storage.py``) and layer."""
        return self._own_planes()

    def _own_planes(self) -> Planes:
        return [buffers for side in self._sides for buffers in side]

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffers in self.planes() for buffer in buffers if buffer is not None]

    def _store(self, side: list[list[Tensor | None]], layer: int, new_BHNC: Tensor) -> Tensor:
        storage = self.plan.storage
        parts = zip(side, storage.encode(new_BHNC), strict=True)
        filled = [self._write(buffers, layer, part_BHNC) for buffers, part_BHNC in parts]
        return storage.decode(filled, new_BHNC.dtype)

    def _write(self, buffers: list[Tensor | None], layer: int, new_BHNC: Tensor) -> Tensor:
        B, _, N, _ = new_BHNC.shape
        buffer = buffers[layer]
        if buffer is None or buffer.shape[2] < self.span or buffer.shape[0] < B:
            buffer = self._grown(buffers, layer, new_BHNC, B, self.span)
        if self._start is not None:
            buffer[:B, :, self._start : self._start + N] = new_BHNC
        else:
            rows_B1, slots_BN = self._ragged_slots()
            write_at(buffer, rows_B1, slots_BN, new_BHNC)
        return buffer[:B, :, : self.span]

    def _ragged_slots(self) -> tuple[Tensor, Tensor]:
        """Rows and slots that the forward pass under way writes; computed for the first layer and
        shared by the others."""
        if self._slots is None:
            device = self.length_B.device
            rows_B1 = torch.arange(self.num_rows, device=device)[:, None]
            slots_BN = query_slots(self.length_B, self._first, self._num_queries)
            self._slots = rows_B1, slots_BN
        return self._slots

    def _grown(
        self, buffers: list[Tensor | None], layer: int, like: Tensor, rows: int, slots: int
    ) -> Tensor:
        """A layer's KV buffer in this plane, of at least this size and with the old contents; slots
        grow by doubling."""
        buffer = buffers[layer]
        old_rows, old_slots = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
        if buffer is not None and rows <= old_rows and slots <= old_slots:
            return buffer
        rows = max(rows, old_rows)
        if slots > old_slots:
            slots = min(rounded(slots, like.device), self.limit)
        self._in_use = (0, [])
        shape = rows, like.shape[1], max(slots, old_slots), like.shape[3]
        place = next(i for i, plane in enumerate(self._own_planes()) if plane is buffers), layer
        grown = buffers[layer] = self._allocate(place, shape, like)
        if buffer is not None:
            grown[:old_rows, :, :old_slots].copy_(buffer)
            if self.plan.pool is not None:
                self.plan.pool.give(place, buffer)
        return grown

    def _allocate(self, place: Place, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        pool = self.plan.pool
        pooled = None if pool is None else pool.take(place, shape, like)
        if pooled is not None:
            return pooled
        bytes_per_buffer = math.prod(shape) * like.element_size()
        wanted = bytes_per_buffer * 2 * self._num_attention_layers(place[1])
        if wanted > self._granted:  # free memory is read once for the buffers of all layers
            if pool is not None and wanted > self._free_bytes(like.device):
                pool.clear()
            self._check_free(shape, like, bytes_per_buffer, wanted)
            self._granted = wanted
        try:
            return like.new_zeros(shape)
        except torch.OutOfMemoryError:
            self._refuse(shape, wanted, self.own_bytes() + self._free_bytes(like.device))
            raise

    def _num_attention_layers(self, layer: int) -> int:
        """How many layers have KV buffers, or will have, as far as is known when this layer gets
        one."""
        return len(self.keys)

    def _check_free(
        self, shape: tuple[int, int, int, int], like: Tensor, bytes_per_buffer: int, wanted: int
    ) -> None:
        held, free = KVCache.own_bytes(self), self._free_bytes(like.device)
        if max(bytes_per_buffer, wanted - held) > free:
            self._refuse(shape, wanted, held + free)

    def _free_bytes(self, device: torch.device) -> int:
        free, memory_budget = free_bytes(device), self.plan.memory_budget
        return (
            free
            if memory_budget is None
            else min(free, memory_budget.num_bytes - memory_budget.held())
        )

    def _refuse(self, shape: tuple[int, int, int, int], wanted: int, at_hand: int) -> None:
        rows, _, slots, _ = shape
        bounded = self.plan.memory_budget is not None
        raise OutOfMemoryError(
            f"KV buffers of {rows} rows x {slots} tokens need {size(wanted)}; "
            f"{size(at_hand)} are at hand, which fit {rows * at_hand // wanted} rows of that "
            f"length: lower max_batch_size, max_new_tokens or the prompt's length"
            + (", or raise max_memory" if bounded else "")
        ) from None


def _side(numbers: list[Tensor | None], plan: KVCachePlan) -> list[list[Tensor | None]]:
    """The planes of keys or of values, each by layer; the first plane holds the numbers."""
    none: list[Tensor | None] = [None] * len(numbers)
    return [numbers, *(list(none) for _ in range(1, plan.storage.planes))]


def rounded(slots: int, device: torch.device) -> int:
    """Slots of a KV buffer that must have at least so many: the next power of two."""
    return max(_FIRST_SLOTS.get(device.type, 64), 1 << math.ceil(math.log2(slots)))


def size(num_bytes: int) -> str:
    """A number of bytes as text."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
