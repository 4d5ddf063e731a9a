"""Prefix reuse: keys and values of sequences that have ended, for prompts that begin as they do.

A key or value depends on the tokens up to its own only. So a prompt that begins with the tokens of
an earlier sequence, as each request of a conversation begins with the one before and its answer,
needs forward passes over the other tokens alone.

A KV cache retains each row that leaves it (``KVCache.keep``), and the prefill of a prompt begins
with the longest retained prefix (``HFModel.begin``). Both happen where rows leave and enter a
cache, so every drafter whose models follow the context gets both. What is retained is a copy,
without the slots that a KV buffer has beyond the sequence.

Legend: B rows, H heads, S slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from outrider.core.lengths import Lengths

if TYPE_CHECKING:
    from outrider.runtime.kv_cache.cache import KVCache

Tokens = np.ndarray[Any, np.dtype[np.int64]]
Planes = list[list[Tensor | None]]


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """The keys and values of one sequence.

    Attributes:
        model: the number of the model that computed them.
        tokens: the sequence's tokens, (S,).
        planes: the stored tensors (H, S, ·), by plane (``storage.py``) and layer.
        long: whether keys have long rotary factors (``hf/longrope.py``).
    """

    model: int
    tokens: Tokens
    planes: Planes
    long: bool

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for plane in self.planes for part in plane if part is not None)

    def is_finite(self) -> bool:
        """Whether all numbers are finite. Waits for the device."""
        parts = [part for plane in self.planes for part in plane if part is not None]
        return all(bool(part.isfinite().all()) for part in parts if part.is_floating_point())


class PrefixCache:
    """The retained prefixes of an engine's models, least recently used first.

    Prefixes take what running requests leave: under ``max_memory`` they are dropped where a request
    that is admitted needs their memory. May be used from several threads.

    Args:
        max_bytes: most bytes that all prefixes take together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._room = max_bytes
        self._prefixes: OrderedDict[int, KVPrefix] = OrderedDict()
        self._numbers, self._models = count(), count()
        self._num_bytes = 0
        self._lock = RLock()

    def of_model(self) -> ModelPrefixes:
        """The part of one more model."""
        return ModelPrefixes(self, next(self._models))

    def own_bytes(self) -> int:
        """Bytes of all prefixes."""
        return self._num_bytes

    def leave(self, num_bytes: int) -> None:
        """Drops the prefixes that have been unused for longest until the others take so many bytes
        at most, and keeps to that until the next call."""
        with self._lock:
            self._room = min(num_bytes, self.max_bytes)
            self._shrink_to(self._room)

    def clear(self) -> bool:
        """Drops all prefixes; returns whether there were any."""
        with self._lock:
            some = bool(self._prefixes)
            self._shrink_to(0)
        return some

    def longest(self, model: int, tokens: Tokens, long: bool) -> tuple[int, KVPrefix | None]:
        """The prefix of a model that shares most tokens with the beginning of a sequence, which is
        thereby used, and how many it shares."""
        most, best = 0, None
        with self._lock:
            for number, prefix in self._prefixes.items():
                if prefix.model == model and prefix.long == long:
                    shared = _num_shared(prefix.tokens, tokens)
                    if shared > most:
                        most, best = shared, number
            if best is None:
                return 0, None
            self._prefixes.move_to_end(best)
            return most, self._prefixes[best]

    def covers(self, model: int, tokens: Tokens, long: bool) -> bool:
        """Whether a retained prefix of a model begins with this sequence, and so is as good; the
        prefix is thereby used."""
        return self.longest(model, tokens, long)[0] == len(tokens)

    def make_room(self, num_bytes: int) -> bool:
        """Drops prefixes for one of so many bytes; false, and drops none, where it cannot fit."""
        with self._lock:
            if num_bytes > self._room:
                return False
            self._shrink_to(self._room - num_bytes)
        return True

    def add(self, prefix: KVPrefix) -> None:
        """Retains a prefix in the place of those that it begins with."""
        with self._lock:
            for number, other in list(self._prefixes.items()):
                alike = other.model == prefix.model and other.long == prefix.long
                if alike and _num_shared(other.tokens, prefix.tokens) == len(other.tokens):
                    self._drop(number)
            self._prefixes[next(self._numbers)] = prefix
            self._num_bytes += prefix.num_bytes
            self._shrink_to(self._room)

    def _shrink_to(self, num_bytes: int) -> None:
        while self._num_bytes > num_bytes:
            self._drop(next(iter(self._prefixes)))

    def _drop(self, number: int) -> None:
        self._num_bytes -= self._prefixes.pop(number).num_bytes


class ModelPrefixes:
    """One model's part of a prefix cache.

    Args:
        cache: the prefixes of all models.
        number: the model's.
    """

    def __init__(self, cache: PrefixCache, number: int) -> None:
        self._all = cache
        self._number = number

    def retain(self, cache: KVCache, rows: Sequence[int]) -> None:
        """Copies what a KV cache holds of the context's committed tokens in these rows. Leaves out
        rows with numbers that are not finite, whose next output would fail, too."""
        context = cache.context
        for row in rows:
            length = min(cache.lengths[row], context.lengths[row] - 1)
            if length < 1:
                continue
            tokens = context.tokens_BT[row, :length].cpu().numpy().copy()
            if self._all.covers(self._number, tokens, cache.long[row]):
                continue
            if not self._all.make_room(length * _bytes_per_slot(cache)):
                continue
            planes = [[_copied(buffer, row, length) for buffer in p] for p in cache.planes()]
            prefix = KVPrefix(self._number, tokens, planes, cache.long[row])
            if prefix.is_finite():
                self._all.add(prefix)

    def reuse(self, cache: KVCache) -> None:
        """Fills an empty KV cache with the longest prefixes of its rows; mutates the cache.

        All rows are left with as many tokens to read, or with all of theirs: a forward pass is a
        rectangle, so rows with a longer prefix save nothing.
        """
        context = cache.context
        tokens_BT = context.tokens_BT.cpu().numpy()
        ends = [length - 1 for length in context.lengths]
        found = [
            self._all.longest(self._number, tokens_BT[row, :end], cache.long[row])
            for row, end in enumerate(ends)
        ]
        width = max(end - shared for end, (shared, _) in zip(ends, found, strict=True))
        lengths = [max(0, end - width) for end in ends]
        for row, (length, (_, prefix)) in enumerate(zip(lengths, found, strict=True)):
            if length:
                assert prefix is not None
                cache.fill(row, prefix.planes, length, max(ends))
        cache.append(Lengths.of(lengths, context.device))


def _num_shared(one: Tokens, other: Tokens) -> int:
    """How many leading tokens two sequences share."""
    end = min(len(one), len(other))
    differs = one[:end] != other[:end]
    return int(differs.argmax()) if differs.any() else end


def _bytes_per_slot(cache: KVCache) -> int:
    """Bytes of one slot of one row in all KV buffers."""
    parts = [buffer for plane in cache.planes() for buffer in plane if buffer is not None]
    return sum(part[0, :, 0].nbytes for part in parts)


def _copied(buffer: Tensor | None, row: int, length: int) -> Tensor | None:
    """A copy of a row's first slots, (H, S, ·)."""
    return None if buffer is None else buffer[row, :, :length].clone()
