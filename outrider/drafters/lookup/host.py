"""Shared by drafters that work on the host: reading the committed tokens, and writing drafts.

A lookup needs tokens as Python integers. Each row has a reader of its own. Before a round every
reader receives the tokens committed since the last round, in one device-to-host copy for the whole
batch. The continuations that the readers find become one batch of chains or trees.

Legend: B rows, N nodes (node 0 is the root), K unread tokens.
"""

from collections.abc import Callable, Sequence
from itertools import count
from operator import eq
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Lengths, cached_arange, to_device

Table = np.ndarray[Any, np.dtype[np.int64]]
_ABSENT = 1 << 30
"""Depth written for nodes that do not exist, larger than any budget."""


class Reader(Protocol):
    """What a drafter remembers of one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the row."""

    def forget(self, num: int) -> None:
        """Undoes the last ``num`` tokens, as if they had never been read."""

    def close(self) -> None:
        """Called once when the row leaves the batch, after all of its tokens have been read."""


R = TypeVar("R", bound=Reader)


class HostState(Generic[R]):
    """The readers of a batch.

    The source of an encoder-decoder is read before the row's own tokens, so that drafts can be
    copied from it.

    Attributes:
        readers: one per row.
        context: the running batch.
        read: number of tokens of each row that its reader has read.
        last: the last token read of each row.
    """

    def __init__(self, context: Context, make: Callable[[int], R]) -> None:
        self.context = context
        self.readers = [make(row) for row in range(context.num_rows)]
        self.read = [0] * context.num_rows
        self.last = [0] * context.num_rows
        self._device = context.device
        self._seen_BT: Tensor | None = None
        self._views: list[memoryview] = []
        for reader, source in zip(self.readers, context.sources or (), strict=False):
            reader.extend(source)
        self.catch_up()

    def catch_up(self) -> None:
        """Reads the tokens committed since the last call."""
        lengths = self.context.lengths
        if lengths == self.read:
            return
        for row, (reader, new) in enumerate(zip(self.readers, self._unread(), strict=True)):
            if new:
                reader.extend(new)
                self.last[row] = new[-1]
        self.read = list(lengths)

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row; called before the context
        changes. One token more is forgotten and read again, which restores ``last``."""
        for row, (length, read) in enumerate(zip(lengths.host, self.read, strict=True)):
            if length < read:
                self.read[row] = max(length - 1, 0)
                self.readers[row].forget(read - self.read[row])

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows; called before the context keeps its own."""
        self.catch_up()
        for row in set(range(len(self.readers))).difference(rows):
            self.readers[row].close()
        self.readers = [self.readers[row] for row in rows]
        self.read = [self.read[row] for row in rows]
        self.last = [self.last[row] for row in rows]

    def join(self, other: "HostState[R]") -> None:
        """Appends the rows of another state."""
        self.readers = self.readers + other.readers
        self.read = self.read + other.read
        self.last = self.last + other.last

    def tensor(self, table: "Table | np.ndarray[Any, np.dtype[np.bool_]]") -> Tensor:
        """A host table as a tensor on the context's device."""
        return to_device(torch.from_numpy(table), self._device)

    def _unread(self) -> list[list[int]]:
        """The unread tokens of each row."""
        context, spans = self.context, list(zip(self.read, self.context.lengths, strict=True))
        if self._device.type == "cpu":
            if self._seen_BT is not context.tokens_BT:  # making the views costs more than a test
                self._seen_BT = context.tokens_BT
                self._views = [memoryview(tokens_T) for tokens_T in self._seen_BT.numpy()]
            return [view[a:b].tolist() for view, (a, b) in zip(self._views, spans, strict=True)]
        K = max(b - a for a, b in spans)  # one copy for all rows, not one per row
        position_BK = context.length_B[:, None] + torch.arange(-K, 0, device=self._device)
        lines = context.tokens_BT.gather(1, position_BK.clamp(min=0)).tolist()
        return [line[K - (b - a) :] for line, (a, b) in zip(lines, spans, strict=True)]


def chain(state: HostState[R], found: Sequence[Sequence[int]], budget: Budget) -> Draft:
    """A draft of chosen chains, one list of tokens per row, cut at the rows' budgets and after
    their end tokens."""
    ends, device = state.context.ends, state.context.device
    if ends is not None:
        found = [ends.cut_tokens(row, tokens) for row, tokens in enumerate(found)]
    N = 1 + max(map(len, found))
    mask_BN = None
    if any(len(tokens) + 1 < N for tokens in found):
        end_B = np.array([len(tokens) for tokens in found])
        mask_BN = state.tensor(np.arange(N) <= end_B[:, None])
    if budget.tokens_B is not None:
        within_BN = cached_arange(N, device) <= budget.tokens_B[:, None]
        mask_BN = within_BN if mask_BN is None else mask_BN & within_BN
    tokens_BN = state.tensor(_table(state.last, found, N))
    return Draft.chain(tokens_BN, mask_BN, None, "chosen")


class Tree(NamedTuple):
    """A token tree on the host, in topological order and without its root.

    Attributes:
        tokens: the token of each node.
        parents: the parent of each node as numbered in the draft: 0 is the root, 1 the first node
            listed here.
    """

    tokens: list[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: list[int]) -> "Tree":
        """A tree with one path."""
        return cls(tokens, range(len(tokens)))

    @property
    def is_chain(self) -> bool:
        """Whether the tree is one path."""
        return all(map(eq, self.parents, count()))

    @property
    def depths(self) -> list[int]:
        """The depth of every node of the draft, beginning with the root's, which is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


def trees(state: HostState[R], found: Sequence[Tree], budget: Budget) -> Draft:
    """A draft of chosen trees, one per row, cut at the depth of the rows' budgets. If every tree is
    a chain, the draft is one of chains, which cost less to verify."""
    if all(tree.is_chain for tree in found):
        return chain(state, [tree.tokens for tree in found], budget)
    N = 1 + max(len(tree.tokens) for tree in found)
    B = len(found)
    tokens_BN = state.tensor(_table(state.last, [tree.tokens for tree in found], N))
    parents_BN = state.tensor(_table([-1] * B, [tree.parents for tree in found], N))
    if budget.tokens_B is None:
        end_B = np.array([len(tree.tokens) for tree in found])
        mask_BN = state.tensor(np.arange(N) <= end_B[:, None])
    else:
        depth_BN = state.tensor(_table([0] * B, [tree.depths[1:] for tree in found], N, _ABSENT))
        mask_BN = depth_BN <= budget.tokens_B[:, None]
    return Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")


def _table(first: Sequence[int], rest: Sequence[Sequence[int]], N: int, absent: int = 0) -> Table:
    """``first`` and ``rest`` of each row side by side, padded to N numbers."""
    flat: list[int] = []  # numpy converts a flat list faster than a list of lists
    for number, numbers in zip(first, rest, strict=True):
        flat.append(number)
        flat.extend(numbers)
        flat.extend([absent] * (N - 1 - len(numbers)))
    return np.array(flat).reshape(len(rest), N)
