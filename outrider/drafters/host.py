"""What drafters that work on the host share: how they read the text, and how they write drafts.

A lookup wants tokens as numbers, not tensors. Each row keeps a reader of its own, and before a
round all readers are handed what was committed since the last one: one look at the device for the
whole batch. What they find goes back as one batch of chains.

Legend: B rows, N nodes (node 0 is the root), K tokens unread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft


class Reader(Protocol):
    """What a drafter knows of one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens of the row."""

    def close(self) -> None:
        """The row has left the batch, as a finished text does; all of it has been read."""


R = TypeVar("R", bound=Reader)


class HostState(Generic[R]):
    """The readers of a batch.

    An encoder-decoder's source text is read before the row's own tokens: it is there to copy from.

    Attributes:
        readers: one per row.
        context: the running batch.
        read: how many tokens of each row its reader has been handed.
        last: the last of them.
    """

    def __init__(self, context: Context, make: Callable[[int], R]) -> None:
        self.context = context
        self.readers = [make(row) for row in range(context.num_rows)]
        self.read = [0] * context.num_rows
        self.last = [0] * context.num_rows
        for reader, source in zip(self.readers, context.sources or (), strict=False):
            reader.extend(source)
        self.catch_up()

    def catch_up(self) -> None:
        """Hands over what has been committed since the last time."""
        lengths = self.context.lengths
        if lengths == self.read:
            return
        lines = _unread(self.context, self.read)
        for row, (reader, new) in enumerate(zip(self.readers, lines, strict=True)):
            if new:
                reader.extend(new)
                self.last[row] = new[-1]
        self.read = list(lengths)

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


def _unread(context: Context, read: Sequence[int]) -> list[list[int]]:
    """The tokens of each row behind those that were read."""
    spans = list(zip(read, context.lengths, strict=True))
    if context.device.type == "cpu":
        tokens_BT = context.tokens_BT.numpy()
        return [tokens_BT[row, a:b].tolist() for row, (a, b) in enumerate(spans)]
    K = max(b - a for a, b in spans)  # elsewhere each row would be a look of its own
    column_BK = context.length_B[:, None] + torch.arange(-K, 0, device=context.device)
    lines = context.tokens_BT.gather(1, column_BK.clamp(min=0)).tolist()
    return [line[K - (b - a) :] for line, (a, b) in zip(lines, spans, strict=True)]


def chain(state: HostState[R], found: Sequence[Sequence[int]], budget: Budget) -> Draft:
    """Chosen chains, one list of tokens per row; the rows' own budgets cut them."""
    N = 1 + max(map(len, found))
    device = state.context.device
    rows = zip(state.last, found, strict=True)
    padded = np.array([[root, *tokens, *[0] * (N - 1 - len(tokens))] for root, tokens in rows])
    tokens_BN = torch.from_numpy(padded).to(device)
    parents_BN, mask_BN = _rectangle(len(found), N, device)
    if any(len(tokens) + 1 < N for tokens in found):
        end_B1 = np.array([[len(tokens)] for tokens in found])
        mask_BN = torch.from_numpy(np.arange(N) <= end_B1).to(device)
    if budget.tokens_B is not None:
        mask_BN = mask_BN & (torch.arange(N, device=device) <= budget.tokens_B[:, None])
    return Draft(tokens_BN, parents_BN, mask_BN, None, "chosen", is_chain=True)


@dataclass(frozen=True)
class Tree:
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
    def depths(self) -> list[int]:
        """Of all nodes of the draft, edges from the root, which comes first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths


def trees(state: HostState[R], found: Sequence[Tree], budget: Budget) -> Draft:
    """Chosen trees, one per row; the rows' own budgets cut them at their depth."""
    N = 1 + max(len(tree.tokens) for tree in found)
    nodes: tuple[list[list[int]], list[list[int]], list[list[int]]] = ([], [], [])
    for root, tree in zip(state.last, found, strict=True):
        absent = N - 1 - len(tree.tokens)
        nodes[0].append([root, *tree.tokens, *[0] * absent])
        nodes[1].append([-1, *tree.parents, *[0] * absent])
        nodes[2].append(tree.depths + [-1] * absent)
    tokens_BN, parents_BN, depth_BN = torch.from_numpy(np.array(nodes)).to(state.context.device)
    mask_BN = depth_BN >= 0
    if budget.tokens_B is not None:
        mask_BN = mask_BN & (depth_BN <= budget.tokens_B[:, None])
    return Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")


@lru_cache(maxsize=256)
def _rectangle(B: int, N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Parents and mask of B full chains. Kept, since making them costs more than looking up."""
    node_N = torch.arange(-1, N - 1, device=device)
    return node_N.expand(B, N), torch.ones(B, N, dtype=torch.bool, device=device)
