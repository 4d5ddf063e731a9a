"""The cache of a model with recurrent layers: the state of each layer, and what it takes to return
to the state after fewer tokens.

A recurrent layer folds all tokens into one state per row, so it cannot forget tokens by moving a
counter. The cache rolls back in two steps. A forward pass leaves the states that it started from
untouched (a snapshot) and records the inputs of each layer's recurrence. When a row keeps fewer
tokens than the pass ran over, the recurrence alone runs again over the kept inputs (the replay).
No weight is read a second time. Rows keep different numbers of tokens: inputs beyond a row's number
change nothing of its state.

Where it is known beforehand how many tokens a row keeps, as in a prefill and in plain decoding, the
pass ends in the right state and records nothing.

Snapshots reach back to the committed tokens of the context. A state after fewer tokens than that
is computed from the row's tokens before the next forward pass (:attr:`RecurrentCache.unread`).

Attention layers of the same model use the KV buffers of :class:`KVCache`.

Legend: B rows, N query tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.core.context import Context
from outrider.core.errors import UnsupportedModelError
from outrider.core.lengths import Lengths, to_device
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.recurrence import Recurrence, State, Window

_MOST_PASSES = 16
"""Passes whose snapshots are kept where it is not known which tokens are committed."""


class Key(NamedTuple):
    """One recurrence of a model: the layer, what it is in the layer, and its number where the layer
    has several of a kind."""

    layer: int
    kind: str
    number: int


@dataclass
class _Pass:
    """A forward pass that may be rolled back.

    Attributes:
        starts: tokens of each row before it; None for a row that has been rolled back to fewer.
        num: query tokens of each row.
        before: the states that it started from.
        inputs: of each recurrence.
        after: the states after all query tokens.
    """

    starts: list[int | None]
    num: int
    before: dict[Key, State] = field(default_factory=dict)
    inputs: dict[Key, tuple[Tensor, ...]] = field(default_factory=dict)
    after: dict[Key, State] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        for each in (self.before, self.inputs, self.after):
            for tensors in each.values():
                yield from tensors


@dataclass(frozen=True)
class RecurrentSnapshot:
    """What a cache returns to.

    Attributes:
        lengths: tokens per row.
        states: the states after these.
        unread: as in :class:`RecurrentCache`.
    """

    lengths: Lengths
    states: Mapping[Key, State]
    unread: tuple[bool, ...]


class RecurrentCache(KVCache):
    """The states of recurrent layers, and the KV buffers of attention layers: a
    ``core.SequenceState``, and the cache that models of ``transformers`` are given.

    Only the verbs of this class and :meth:`run`, which a layer calls in a forward pass, write
    states.

    Attributes:
        unread: which rows have states that stand for other tokens than the row's, since it was
            rolled back further than the snapshots reach. They are read again before the next pass.
    """

    cuts_back = False
    can_lead = False
    has_previous_state = staticmethod(lambda *args, **kwargs: False)

    def __init__(self, context: Context, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, *args, **kwargs)
        self.unread = [False] * context.num_rows
        self._recurrences: dict[Key, Recurrence] = {}
        self._states: dict[Key, State] = {}
        self._passes: list[_Pass] = []
        self._running = _Pass(list(self.lengths), 0)
        self._kept: Lengths | None = None
        self._kept_B: Tensor | None = None
        self._counts: dict[tuple[int, str], int] = {}

    def begin(self, num_queries: int, first: int = 0, kept: Lengths | None = None) -> None:
        """Prepares for a forward pass.

        Raises:
            UnsupportedModelError: query tokens of a tree.
        """
        if first:
            raise UnsupportedModelError(
                "a recurrent state follows one chain of tokens, and cannot run over the nodes of a "
                "tree: take a method that drafts chains"
            )
        super().begin(num_queries)
        self._drop_passes()
        self._running = _Pass(list(self.lengths), num_queries, dict(self._states))
        self._kept, self._kept_B, self._counts = kept, None, {}
        if kept is not None and min(kept.host) < num_queries:
            self._kept_B = kept.device_B

    def run(self, layer: int, kind: str, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        """One recurrence of a layer over the query tokens of the forward pass; its output.

        Args:
            layer: the layer.
            kind: what the recurrence is in the layer.
            recurrence: how its state follows tokens.
            inputs: what the layer computed of the tokens.
        """
        number = self._counts.get((layer, kind), 0)
        self._counts[layer, kind] = number + 1
        key, running = Key(layer, kind, number), self._running
        state = self._states.get(key) or recurrence.empty(inputs)
        output, running.after[key] = recurrence.run(state, inputs, self._kept_B)
        running.before[key] = state
        self._recurrences[key] = recurrence
        if self._kept is None:
            running.inputs[key] = inputs
        return output

    def state(self, layer: int, kind: str) -> Tensor:
        """The first tensor of the state that the last :meth:`run` of that kind ended in."""
        number = self._counts[layer, kind] - 1
        return self._running.after[Key(layer, kind, number)][0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that a layer calls :meth:`update_conv_state` for any number of tokens."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that a layer computes one token by the code for several."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The inputs of a convolution, (B, C, N), after those of the last tokens before."""
        if conv_kernel_size is None:
            raise _out_of_reach(layer_idx)
        return self.run(layer_idx, f"conv{state_idx}", Window(conv_kernel_size), conv_states)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Returns the state; :meth:`run` has stored it.

        Raises:
            UnsupportedModelError: the layer computed it by other means, from an empty state.
        """
        ran = {kind for layer, kind in self._counts if layer == layer_idx}
        if all(kind.startswith("conv") for kind in ran):
            raise _out_of_reach(layer_idx)
        return recurrent_states

    def append(self, num: Lengths | int) -> None:
        """Keeps the next ``num`` query tokens of the last forward pass, per row or in all rows."""
        before, running = self.lengths, self._running
        super().append(num)
        if self._kept is not None:
            assert self.lengths == [n + m for n, m in zip(before, self._kept.host, strict=True)]
            self._states = running.after
            self._forget_passes()
            return
        if not self._passes or self._passes[-1] is not running:
            self._passes.append(running)
        self._return_to(before)

    def select(self, index_BD: Tensor, num_accepted: Lengths) -> None:
        """A recurrent model scores chains, whose tokens :meth:`append` keeps."""
        raise UnsupportedModelError("a recurrent state cannot follow the path of a tree")

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row; a row that has fewer keeps what
        it has."""
        before = self.lengths
        super().rollback(lengths)
        self._return_to(before)

    def snapshot(self) -> Any:
        """The lengths and the states, which are never modified."""
        return RecurrentSnapshot(self.sequence_lengths, dict(self._states), tuple(self.unread))

    def restore(self, snapshot: Any) -> None:
        """Returns to a snapshot of the same rows."""
        self.sequence_lengths = snapshot.lengths
        self._states, self.unread = dict(snapshot.states), list(snapshot.unread)
        self._forget_passes()

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order (``rows[i] >= i``)."""
        same = list(rows) == list(range(self.num_rows))
        super().keep(rows)
        if same:
            return
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.length_B.device)
        self.unread = [self.unread[row] for row in rows]
        self._states = _rows_of(self._states, index_B)
        for each in self._passes:
            each.starts = [each.starts[row] for row in rows]
            each.before = _rows_of(each.before, index_B)
            each.inputs = {k: tuple(x[index_B] for x in xs) for k, xs in each.inputs.items()}
            each.after = _rows_of(each.after, index_B)
        if not self._passes:
            self._forget_passes()

    def join(self, other: KVCache) -> None:
        """Appends the rows of another cache. Snapshots of before are dropped."""
        assert isinstance(other, RecurrentCache)
        num, others = self.num_rows, other.num_rows
        super().join(other)
        self.unread = self.unread + other.unread
        self._recurrences = other._recurrences | self._recurrences
        joined = {}
        for key, recurrence in self._recurrences.items():
            mine, theirs = self._states.get(key), other._states.get(key)
            if mine is None and theirs is None:
                continue
            mine = mine or _filled(recurrence, theirs, num)
            theirs = theirs or _filled(recurrence, mine, others)
            joined[key] = tuple(torch.cat(pair) for pair in zip(mine, theirs, strict=True))
        self._states = joined
        self._forget_passes()

    def replace(self, row: int, other: "RecurrentCache") -> None:
        """Gives a row the states of another cache's only row, which has read the same tokens."""
        rows_B = torch.arange(self.num_rows, device=self.length_B.device) == row
        for key, states in other._states.items():
            mine = self._states[key]
            self._states[key] = tuple(
                _where(rows_B, *pair) for pair in zip(states, mine, strict=True)
            )
        self.unread[row] = False
        for each in self._passes:
            each.starts[row] = None

    def own_bytes(self) -> int:
        """Bytes of KV buffers, states and snapshots."""
        return super().own_bytes() + self.state_bytes()

    def state_bytes(self) -> int:
        """Bytes of states and snapshots, with the inputs that are recorded for a replay."""
        tensors = [x for state in self._states.values() for x in state]
        for each in (*self._passes, self._running):
            tensors += each.tensors()
        return sum({id(x): x.nbytes for x in tensors}.values())

    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of all states, and of the inputs that the last pass recorded."""
        states = sum(x.nbytes for state in self._states.values() for x in state)
        return states, sum(x.nbytes for xs in self._running.inputs.values() for x in xs)

    def _num_attention_layers(self, layer: int) -> int:
        """All of them have KV buffers after the first pass."""
        others = [keys for i, keys in enumerate(self.keys) if i != layer and keys is not None]
        return 1 + len(others)

    def _return_to(self, before: Sequence[int]) -> None:
        """Makes the states of the rows whose lengths were others before those after their tokens
        now."""
        changed = [row for row, n in enumerate(self.lengths) if n != before[row]]
        chosen = {row: self._pass_of(row, self.lengths[row]) for row in changed}
        for row, number in chosen.items():
            for each in self._passes[number + 1 :]:
                each.starts[row] = None
        for number in sorted({number for number in chosen.values() if number >= 0}):
            starts = self._passes[number].starts
            rows = [row for row in changed if chosen[row] == number]
            self._replay(number, {row: self.lengths[row] - (starts[row] or 0) for row in rows})
        lost = [row for row in changed if chosen[row] < 0]
        for row in lost:
            self.unread[row] = self.lengths[row] > 0
        if any(self.lengths[row] == 0 for row in lost):
            self._empty([row for row in lost if self.lengths[row] == 0])
        while self._passes and not any(n is not None for n in self._passes[-1].starts):
            self._passes.pop()

    def _replay(self, number: int, kept: Mapping[int, int]) -> None:
        """Gives rows the states after their first ``kept`` tokens of a pass."""
        each, device = self._passes[number], self.length_B.device
        everywhere = len(kept) == self.num_rows
        if everywhere and min(kept.values()) == each.num and each.after:
            self._states = dict(each.after)
            return
        rows_B = to_device(torch.tensor([b in kept for b in range(self.num_rows)]), device)
        kept_B = to_device(torch.tensor([kept.get(b, 0) for b in range(self.num_rows)]), device)
        for key, inputs in each.inputs.items():
            each.after.pop(key, None)  # one state less to hold from here on
            before = state = each.before[key]
            if any(kept.values()):
                state = self._recurrences[key].run(before, inputs, kept_B)[1]
            if not everywhere:
                now = self._states.get(key, before)  # the first pass finds no states
                state = tuple(_where(rows_B, *pair) for pair in zip(state, now, strict=True))
            self._states[key] = state

    def _empty(self, rows: Sequence[int]) -> None:
        """Gives rows the states of empty sequences."""
        rows_B = torch.zeros(self.num_rows, dtype=torch.bool)
        rows_B[list(rows)] = True
        rows_B = to_device(rows_B, self.length_B.device)
        for key, state in self._states.items():
            none = _filled(self._recurrences[key], state, self.num_rows)
            self._states[key] = tuple(
                _where(rows_B, *pair) for pair in zip(none, state, strict=True)
            )

    def _pass_of(self, row: int, length: int) -> int:
        """The last pass that began with at most so many tokens of a row; -1 if there is none."""
        for number in range(len(self._passes) - 1, -1, -1):
            start = self._passes[number].starts[row]
            if start is not None and start <= length:
                return number
        return -1

    def _drop_passes(self) -> None:
        """Drops the passes that no row will be rolled back into."""
        committed = [n - 1 for n in self.context.lengths]
        if len(committed) != self.num_rows:
            del self._passes[:-_MOST_PASSES]
            return
        rows = [row for row in range(self.num_rows) if self.lengths[row] > committed[row]]
        if not rows:
            self._passes = []
            return
        del self._passes[: max(0, min(self._pass_of(row, committed[row]) for row in rows))]

    def _forget_passes(self) -> None:
        self._passes = []
        self._running = _Pass(list(self.lengths), 0)


def _out_of_reach(layer: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer} computes its recurrent state by a function that is not known here, as in "
        f"other versions of transformers: recurrent models are tested with transformers 5.23"
    )


def _where(rows_B: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(rows_B.view(-1, *[1] * (no.ndim - 1)), yes, no)


def _rows_of(states: Mapping[Key, State], index_B: Tensor) -> dict[Key, State]:
    return {key: tuple(x[index_B] for x in state) for key, state in states.items()}


def _filled(recurrence: Recurrence, like: State | None, rows: int) -> State:
    """The state of so many empty sequences."""
    assert like is not None
    pairs = zip(like, recurrence.fill, strict=True)
    return tuple(x.new_full((rows, *x.shape[1:]), value) for x, value in pairs)
