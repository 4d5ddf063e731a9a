"""What drafters that work on the host share: how they read sequences, and how they write drafts.

A lookup needs tokens as numbers, not as tensors. Each row has a reader of its own. Before a round
all readers get the tokens committed since the last one, in one read of the device for the whole
batch. What they find goes back as one batch of drafts.

Legend: B rows, N nodes (node 0 is the root), K tokens unread.
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
"""The depth of nodes that are not there: beyond any budget."""


class Reader(Protocol):
    """What a drafter remembers of one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the row."""

    def forget(self, num: int) -> None:
        """Forgets the last ``num`` tokens, as if they had never been read."""

    def close(self) -> None:
        """Ends the row, which has left the batch; all its tokens have been read."""


R = TypeVar("R", bound=Reader)


class HostState(Generic[R]):
    """The readers of a batch.

    A reader of an encoder-decoder reads the source text before the row's own tokens, to copy from
    it.

    Attributes:
        readers: one per row.
        context: the running batch.
        read: how many tokens of each row its reader has read.
        last: the last token that it has read.
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
        """Reads what has been committed since the last call."""
        lengths = self.context.lengths
        if lengths == self.read:
            return
        for row, (reader, new) in enumerate(zip(self.readers, self._unread(), strict=True)):
            if new:
                reader.extend(new)
                self.last[row] = new[-1]
        self.read = list(lengths)

    def rollback(self, lengths: Lengths) -> None:
        """Forgets all but the first ``lengths`` tokens of each row, and the last of these, which is
        read again to become ``last``; called before the context changes."""
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
        """A table on the host as a tensor on the context's device."""
        return to_device(torch.from_numpy(table), self._device)

    def _unread(self) -> list[list[int]]:
        """The tokens of each row that its reader has not read."""
        context, spans = self.context, list(zip(self.read, self.context.lengths, strict=True))
        if self._device.type == "cpu":
            if self._seen_BT is not context.tokens_BT:  # a view costs more than a read
                self._seen_BT = context.tokens_BT
                self._views = [memoryview(tokens_T) for tokens_T in self._seen_BT.numpy()]
            return [view[a:b].tolist() for view, (a, b) in zip(self._views, spans, strict=True)]
        K = max(b - a for a, b in spans)  # elsewhere each row would be a synchronisation of its own
        column_BK = context.length_B[:, None] + torch.arange(-K, 0, device=self._device)
        lines = context.tokens_BT.gather(1, column_BK.clamp(min=0)).tolist()
        return [line[K - (b - a) :] for line, (a, b) in zip(lines, spans, strict=True)]


def chain(state: HostState[R], found: Sequence[Sequence[int]], budget: Budget) -> Draft:
    """Chosen chains from one list of tokens per row, cut at the rows' budgets and end tokens."""
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
    """Tokens on the host, in topological order; the root is not among them.

    Attributes:
        tokens: of each node.
        parents: of each node, the parent's number in the draft: 0 is the root, 1 the first here.
    """

    tokens: list[int]
    parents: Sequence[int]

    @classmethod
    def chain(cls, tokens: list[int]) -> "Tree":
        """One path."""
        return cls(tokens, range(len(tokens)))

    @property
    def is_chain(self) -> bool:
        """Whether it is one path."""
        return all(map(eq, self.parents, count()))

    @property
    def depths(self) -> list[int]:
        """Of all nodes of the draft, edges from the root, which comes first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


def trees(state: HostState[R], found: Sequence[Tree], budget: Budget) -> Draft:
    """Chosen trees, one per row; the rows' own budgets cut them at their depth. Chains where all of
    them are, which cost less to draft and to verify."""
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
    """A number per row and what follows it there, filled up to N columns."""
    flat: list[int] = []  # of which numpy makes a table sooner than of lists in a list
    for number, numbers in zip(first, rest, strict=True):
        flat.append(number)
        flat.extend(numbers)
        flat.extend([absent] * (N - 1 - len(numbers)))
    return np.array(flat).reshape(len(rest), N)
