"""Which requests may begin: those whose KV buffers fit below ``max_memory``. The others wait.

The KV buffers of a batch are a rectangle per model: R rows, the most there were at once since the
batch began, and S slots, the longest text when it is done with the nodes of a draft behind it,
rounded up as KV buffers grow. They are given back when the last row has left. So what a batch
reserves is

    Σ models' KV buffers of R × S                 what they grow to
    + their largest single tensor            a KV buffer that grows is copied, one at a time
    + Σ models' KV buffers of the newcomers       made by themselves, then copied into the batch's

and a request is admitted if that fits beside what other batches of the engine (streams that have
not ended) have reserved. A first batch leaves room for the next newcomer, where there is one.

Texts are reserved at full length, prompt and ``max_new_tokens``. In the tokens of a draft with a
vocabulary of its own a text may be longer; it is reserved at ``STRETCH`` times its length. Where a
reservation was too low all the same, an :class:`MemoryBudget` holds the bound: a KV buffer beyond
it raises.
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
from outrider.engine.request import Request
from outrider.runtime import HFModel
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.runtime.kv_cache.cache import rounded, size
from outrider.runtime.kv_cache.footprint import Footprint

STRETCH = 4
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(max_memory: int | str) -> int:
    """A number of bytes, or a text such as ``512MiB``, ``2GB`` or ``1.5G`` (GiB).

    Raises:
        InvalidParameterError: anything else, or less than a byte.
    """
    if isinstance(max_memory, int) and is_whole(max_memory) and max_memory > 0:
        return max_memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)((?:I?B)?)\s*", str(max_memory).upper())
    if isinstance(max_memory, str) and found is not None:
        number, unit, kind = found.groups()
        num_bytes = float(number) * (1000 if kind == "B" else 1024) ** _UNITS[unit]
        if 1 <= num_bytes < math.inf:
            return int(num_bytes)
    raise InvalidParameterError(
        f"max_memory={shown(max_memory)}: must be a number of bytes, such as 512MiB or 2GB"
    )


@dataclass(frozen=True)
class Need:
    """Tokens of a row, or the most of several.

    Attributes:
        first: of the text when it begins.
        text: when it is done.
        source: of the source, where there is one.
    """

    first: int = 0
    text: int = 0
    source: int = 0


class Memory:
    """What an engine's KV buffers may take, and what its running batches have reserved of it.

    Args:
        max_memory: bytes.
        target: the target.
        drafter: the drafter; its ``capabilities`` name its models, and how many slots behind the
            text a draft of γ levels takes in them and in the target.
        num_speculative_tokens: γ.
        stretch: how much longer a text may be in the draft models' tokens.

    Attributes:
        reservations: of the batches that there are, in whatever thread.
        lock: to be held from looking at the reservations until one is made.
    """

    def __init__(
        self,
        max_memory: int,
        target: HFModel,
        drafter: Drafter[Any],
        num_speculative_tokens: int,
        stretch: int = 1,
    ) -> None:
        self.max_memory = max_memory
        self.reservations: WeakKeyDictionary[Reservation, int] = WeakKeyDictionary()
        self.lock = RLock()
        able = drafter.capabilities
        own = [m for m in able.models if not (isinstance(target, EarlyExit) and m is target.first)]
        self._models = [(model, Footprint.of(model)) for model in (target, *own)]
        self._stretches = [1, *[stretch] * len(own)]
        self._limit = target.limit
        self._nodes = able.max_nodes(num_speculative_tokens)

    def need(self, request: Request) -> Need:
        """A request's tokens."""
        first = len(request.first_ids)
        text = min(first + request.sampling.max_new_tokens, self._limit)
        source = 0 if request.decoder_prompt is None else len(request.prompt_ids)
        return Need(first, text, source)

    def check(self, request: Request) -> None:
        """Raises OutOfMemoryError for a request that does not fit alone."""
        need = self.need(request)
        wanted = self.final(1, need)
        if wanted > self.max_memory:
            raise OutOfMemoryError(
                f"a prompt of {len(request.prompt_ids)} tokens with up to "
                f"{need.text - need.first} new ones needs {_exactly(wanted)} of KV buffers, "
                f"and max_memory is {_exactly(self.max_memory)}: raise it, lower max_new_tokens, "
                f"shorten the prompt, or store KV buffers with kv_dtype='int8'"
            )

    def final(self, rows: int, need: Need) -> int:
        """Bytes of a batch when its texts are done, the copy of one tensor included."""
        shapes = self._shapes(need.text, need.source, self._nodes)
        copies = [footprint.plane * rows * slots for footprint, slots, _ in shapes]
        return _bytes(rows, shapes) + max(copies)

    def first(self, rows: int, need: Need) -> int:
        """Bytes of newcomers before they join."""
        return _bytes(rows, self._shapes(need.first, need.source, 0))

    def _shapes(self, text: int, source: int, nodes: int) -> list[tuple[Footprint, int, int]]:
        """Slots of text and source that each model's KV buffers have."""
        shapes = []
        for (model, footprint), stretch in zip(self._models, self._stretches, strict=True):
            most = model.limit + max(MARGIN, self._nodes)
            slots = min(rounded(min(stretch * text, model.limit) + nodes), most)
            shapes.append((footprint, slots, min(stretch * source, model.limit)))
        return shapes


class Reservation:
    """What one batch has reserved.

    Args:
        memory: of whom.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rows = 0
        self._need = Need()

    def admit(self, running: int, waiting: Sequence[Request], most: int) -> int:
        """Reserves for as many of the waiting requests as fit, in their order; how many.

        Raises:
            OutOfMemoryError: none, and nothing is running that could make room.
        """
        needs = [self._memory.need(request) for request in waiting]
        with self._memory.lock:
            count = self._fitting(running, needs, most)
            if count:
                self._memory.reservations[self] = self._bytes(running, needs[:count])
        if count:
            self._rows, self._need = self._with(running, needs[:count])
        return count

    def clear(self) -> None:
        """Gives back everything: the last row has left."""
        with self._memory.lock:
            if self in self._memory.reservations:
                self._memory.reservations[self] = 0
        self._rows, self._need = 0, Need()

    def _fitting(self, running: int, needs: Sequence[Need], most: int) -> int:
        others = sum(
            n for reservation, n in self._memory.reservations.items() if reservation is not self
        )
        left = self._memory.max_memory - others
        count = 0
        while count < min(most, len(needs)) and self._fits(running, needs, count + 1, left):
            count += 1
        if count == 0 and not running:
            raise OutOfMemoryError(
                f"{_exactly(others)} of max_memory, {_exactly(self._memory.max_memory)}, are "
                f"reserved by texts of this engine that have not ended: let these streams end, or "
                f"close them"
            )
        return count

    def _fits(self, running: int, needs: Sequence[Need], count: int, left: int) -> bool:
        wanted = self._bytes(running, needs[:count])
        if not running and 1 < count < len(needs):
            wanted += self._memory.first(1, needs[count])
        return wanted <= left

    def _bytes(self, running: int, newcomers: Sequence[Need]) -> int:
        final = self._memory.final(*self._with(running, newcomers))
        if not running:
            return final
        return final + self._memory.first(len(newcomers), _most(newcomers))

    def _with(self, running: int, newcomers: Sequence[Need]) -> tuple[int, Need]:
        """Rows and longest text of the batch's KV buffers, once these have joined."""
        return max(self._rows, running + len(newcomers)), _most([self._need, *newcomers])


def _exactly(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({size(num_bytes)})"


def _bytes(rows: int, shapes: Sequence[tuple[Footprint, int, int]]) -> int:
    return sum(footprint.bytes(rows, slots, source) for footprint, slots, source in shapes)


def _most(needs: Sequence[Need]) -> Need:
    return Need(
        max(need.first for need in needs),
        max(need.text for need in needs),
        max(need.source for need in needs),
    )
