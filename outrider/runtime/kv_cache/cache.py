"""KV buffers: preallocated, written at per-row slots, rolled back by moving a counter.

A KV buffer is one layer's keys (or values) of all rows, ``(rows, heads, slots, width)``. The tokens
of a row fill its slots from 0 on; a pass writes its nodes behind them, and what is not committed is
overwritten by the next pass. KV buffers grow by doubling, up to the model's context. How they store
numbers is in ``buffers.py``: what is written here are planes, tensors (rows, heads, slots, ·) of
which a KV buffer has one, or a second with scales.

Legend: B rows, N columns of a pass, S slots, D depth, H heads, C width of a head.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.core.context import Context
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import OutOfMemoryError
from outrider.core.health import Health
from outrider.runtime.kv_cache.free_memory import free_bytes
from outrider.runtime.kv_cache.storage import KVCachePlan, KVLayout

PLAIN = KVCachePlan()
_FIRST_SLOTS = 64


class KVCache(Cache):
    """The keys and values of a batch; a drop-in for the caches of ``transformers``.

    Args:
        context: the batch it belongs to.
        num_layers: attention layers of the model.
        limit: most slots per row, the model's context.
        plan: how KV buffers store numbers, and how much they may.

    Attributes:
        keys: by layer, the numbers as they are stored, (B, H, S, C); None before the first pass.
        values: the same.
        length_B: committed slots per row, on the device.
        lengths: an upper bound of the same on the host, exact when a pass begins.
        long: which rows have keys with long rotary factors (``longrope.py``).
        health: where passes are noted: the context's, once the cache is filled.
    """

    is_compileable = False

    def __init__(
        self, context: Context, num_layers: int, limit: int, plan: KVCachePlan = PLAIN
    ) -> None:
        super().__init__(layers=[])
        self.context = context
        self.limit = limit
        self.lengths = [0] * context.num_rows
        self.length_B = torch.zeros_like(context.length_B)
        self.long = [False] * context.num_rows
        self.plan = plan
        self.health = Health()
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._sides = [_side(self.keys, plan), _side(self.values, plan)]
        if plan.memory_budget is not None:
            plan.memory_budget.share(self)
        self.span = 0
        self._start: int | None = 0
        self._first = self._num_columns = 0
        self._places: tuple[Tensor, Tensor] | None = None
        self._room = (0, 0)
        self._in_use: tuple[int, list[Tensor]] = (0, [])

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same length, so that a pass is one contiguous write."""
        return self._start is not None

    @property
    def is_plain(self) -> bool:
        """Whether KV buffers hold numbers just as the model computes them."""
        return self.plan.kv_dtype == "auto"

    def begin(self, num_columns: int, first: int = 0) -> None:
        """Says that the next pass writes ``num_columns`` nodes behind the committed slots, from
        the ``first``-th slot there on."""
        longest = max(self.lengths)
        self.span = longest + first + num_columns
        self._start = longest + first if min(self.lengths) == longest else None
        self._first, self._num_columns, self._places = first, num_columns, None

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: stores (B, H, N, C) and returns the filled span."""
        return (
            self._store(self._sides[0], layer_idx, key_states),
            self._store(self._sides[1], layer_idx, value_states),
        )

    def reserve(self, num_rows: int, num_slots: int, layout: KVLayout) -> None:
        """Allocates ahead: passes up to that size neither grow KV buffers nor copy them. Rounds
        slots up as growing does, keeps what is there."""
        for layer, (heads, *widths) in enumerate(layout.shapes):
            for side, width in zip(self._sides, widths, strict=True):
                none = torch.empty(0, heads, 0, width, dtype=layout.dtype, device=layout.device)
                for buffers, like in zip(side, self.plan.storage.encode(none), strict=True):
                    buffers[layer] = self._grown(buffers[layer], like, num_rows, num_slots)

    def make_room(self) -> bool:
        """Grows the KV buffers to what the pass that has begun will read, as a graph cannot; False
        where there are layers without KV buffers yet, which the pass itself allocates."""
        rows, slots = self._room
        if self.num_rows <= rows and self.span <= slots:
            return True
        for side in self._sides:
            for buffers in side:
                for layer, buffer in enumerate(buffers):
                    if buffer is None:
                        return False
                    buffers[layer] = self._grown(buffer, buffer, self.num_rows, self.span)
        buffers_now = self._buffers()
        self._room = min(s.shape[0] for s in buffers_now), min(s.shape[2] for s in buffers_now)
        return True

    def in_use(self) -> list[Tensor]:
        """All KV buffers, keys then values, without the rows that nobody uses; kept until they
        grow."""
        rows, buffers = self._in_use
        if rows != self.num_rows:
            buffers = [buffer[: self.num_rows] for buffer in self._buffers()]
            self._in_use = self.num_rows, buffers
        return buffers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.limit

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0

    def commit_path(self, draft: Draft, verdict: Verdict) -> None:
        """Keeps root and accepted path; a path that is no chain is gathered into place."""
        if not draft.is_chain:
            index_BD = draft.query_tokens.index_BN.gather(1, verdict.path_BD)
            if index_BD.device.type == "cpu":  # elsewhere a synchronisation costs more
                index_BD = index_BD[:, : int(verdict.num_accepted_B.max())]
            self.pack(index_BD, 1)
        self.length_B = self.length_B + verdict.num_emitted_B

    def pack(self, nodes_BD: Tensor, first: int = 0) -> None:
        """Moves nodes behind the committed slots to the places ``first``, ``first + 1``, … there,
        positions unchanged."""
        rows_B1 = torch.arange(self.num_rows, device=nodes_BD.device)[:, None]
        from_BD = self.length_B[:, None] + nodes_BD
        place_D = first + torch.arange(nodes_BD.shape[1], device=nodes_BD.device)
        to_BD = self.length_B[:, None] + place_D
        for buffer in self._buffers():
            buffer[rows_B1, :, to_BD] = buffer[rows_B1, :, from_BD]

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order (``rows[i] >= i``); the KV buffers stay allocated."""
        for buffer in self._buffers():
            for to, row in enumerate(rows):
                if to != row:
                    buffer[to].copy_(buffer[row])
        self.lengths = [self.lengths[row] for row in rows]
        self.long = [self.long[row] for row in rows]
        self.length_B = self.length_B[
            torch.tensor(rows, dtype=torch.int64, device=self.length_B.device)
        ]

    def join(self, other: "KVCache") -> None:
        """Appends the rows of another cache."""
        first, total = self.num_rows, self.num_rows + other.num_rows
        used = max(other.lengths)
        for buffers, others in zip(self._planes(), other._planes(), strict=True):
            for layer, theirs in enumerate(others):
                if theirs is None or used == 0:
                    continue
                mine = buffers[layer]
                slots = max(used, 0 if mine is None else mine.shape[2])
                mine = self._grown(mine, theirs, total, slots)
                mine[first:total, :, :used].copy_(theirs[: other.num_rows, :, :used])
                buffers[layer] = mine
        self.lengths = self.lengths + other.lengths
        self.long = self.long + other.long
        self.length_B = torch.cat([self.length_B, other.length_B])

    def row(self, index: int, context: Context) -> "KVCache":
        """One row as an empty cache of its own in the same memory: what it writes, this one holds.

        Args:
            index: which row.
            context: a batch of that row alone, with no more tokens in its cache than this one has.
        """
        view = KVCache(context, len(self.keys), self.limit, KVCachePlan(self.plan.kv_dtype))
        for theirs, ours in zip(view._planes(), self._planes(), strict=True):
            theirs[:] = [None if buffer is None else buffer[index : index + 1] for buffer in ours]
        return view

    def num_bytes(self) -> int:
        """Memory held by all KV buffers."""
        return self.own_bytes()

    def own_bytes(self) -> int:
        """The same without the KV buffers of caches inside this one."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def _planes(self) -> list[list[Tensor | None]]:
        return [buffers for side in self._sides for buffers in side]

    def _buffers(self) -> list[Tensor]:
        return [buffer for buffers in self._planes() for buffer in buffers if buffer is not None]

    def _store(self, side: list[list[Tensor | None]], layer: int, new_BHNC: Tensor) -> Tensor:
        storage = self.plan.storage
        parts = zip(side, storage.encode(new_BHNC), strict=True)
        filled = [self._write(buffers, layer, part_BHNC) for buffers, part_BHNC in parts]
        return storage.decode(filled, new_BHNC.dtype)

    def _write(self, buffers: list[Tensor | None], layer: int, new_BHNC: Tensor) -> Tensor:
        B, _, N, _ = new_BHNC.shape
        buffer = buffers[layer]
        if buffer is None or buffer.shape[2] < self.span or buffer.shape[0] < B:
            buffer = buffers[layer] = self._grown(buffer, new_BHNC, B, self.span)
        if self._start is not None:
            buffer[:B, :, self._start : self._start + N] = new_BHNC
        else:
            rows_B1, slots_BN = self._ragged_places()
            buffer[rows_B1, :, slots_BN] = new_BHNC.transpose(1, 2)
        return buffer[:B, :, : self.span]

    def _ragged_places(self) -> tuple[Tensor, Tensor]:
        """Rows and slots of the pass that has begun, made when the first layer asks for them."""
        if self._places is None:
            device = self.length_B.device
            columns_N = torch.arange(self._first, self._first + self._num_columns, device=device)
            rows_B1 = torch.arange(self.num_rows, device=device)[:, None]
            self._places = rows_B1, self.length_B[:, None] + columns_N
        return self._places

    def _grown(self, buffer: Tensor | None, like: Tensor, rows: int, slots: int) -> Tensor:
        """A KV buffer of at least this size with the old contents; doubles what is too small."""
        old_rows, old_slots = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
        if buffer is not None and rows <= old_rows and slots <= old_slots:
            return buffer
        rows = max(rows, old_rows)
        if slots > old_slots:
            slots = min(rounded(slots), self.limit)
        self._in_use = (0, [])
        grown = self._allocate((rows, like.shape[1], max(slots, old_slots), like.shape[3]), like)
        if buffer is not None:
            grown[:old_rows, :, :old_slots].copy_(buffer)
        return grown

    def _allocate(self, shape: tuple[int, int, int, int], like: Tensor) -> Tensor:
        bytes_per_buffer = math.prod(shape) * like.element_size()
        wanted = bytes_per_buffer * 2 * len(self.keys)
        held, free = self.own_bytes(), self._free_bytes(like.device)
        if max(bytes_per_buffer, wanted - held) > free:
            self._refuse(shape, wanted, held + free)
        try:
            return like.new_zeros(shape)
        except torch.OutOfMemoryError:
            self._refuse(shape, wanted, held + free)
            raise

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
    """The planes of keys or of values, each by layer; the numbers are the first."""
    none: list[Tensor | None] = [None] * len(numbers)
    return [numbers, *(list(none) for _ in range(1, plan.storage.planes))]


def rounded(slots: int) -> int:
    """The slots of a KV buffer that has to have so many: the next power of two."""
    return max(_FIRST_SLOTS, 1 << math.ceil(math.log2(slots)))


def size(num_bytes: int) -> str:
    """A number of bytes, to read."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
