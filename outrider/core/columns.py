"""Which nodes of a draft get a column of the target's pass: of equal siblings, one.

Independent draws repeat themselves: where the draft is sure, most siblings are equal. To the rules
they are several draws; to the target they are one node, whose logits and keys serve all of them.

How many columns are left is known only after a look at the device, which costs nothing on a CPU and
more than the columns saved elsewhere; there every node keeps its column.

Legend: B rows, N nodes, D depths, M columns (the most that any row needs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.core.draft import Draft


@dataclass(frozen=True)
class Columns:
    """The columns of a pass over a draft.

    Attributes:
        node_BM: the node of each column; a row that needs fewer than M repeats one at the end.
        column_BN: the column of each node: that of the first node with the same path of tokens,
            the root's for nodes that are not there.
        ancestors_BMM: ``[b, i, j]`` is true iff column j is i or an ancestor of i.
        depth_BM: edges between each column's node and the root.
    """

    node_BM: Tensor
    column_BN: Tensor
    ancestors_BMM: Tensor
    depth_BM: Tensor

    @classmethod
    def of(cls, draft: Draft) -> Columns:
        """One column per path of tokens if siblings may be equal, else one per node."""
        if draft.drawn == "iid" and draft.tokens_BN.device.type == "cpu":
            return cls.merged(draft)
        return cls.each(draft)

    @classmethod
    def each(cls, draft: Draft) -> Columns:
        """One column per node."""
        number_BN = torch.arange(draft.num_nodes, device=draft.tokens_BN.device)
        number_BN = number_BN.expand_as(draft.tokens_BN)
        return cls(number_BN, number_BN, draft.ancestors_BNN, draft.depth_BN)

    @classmethod
    def merged(cls, draft: Draft) -> Columns:
        """One column per path of tokens, unless that saves none. Looks at the device."""
        B, N = draft.tokens_BN.shape
        first_BN = _first_of_path(draft)
        number_N = torch.arange(N, device=first_BN.device)
        is_first_BN = first_BN == number_N
        M = int(is_first_BN.sum(1).max())
        if M == N:
            return cls.each(draft)
        node_BM = torch.where(is_first_BN, number_N, N).sort(1).values[:, :M].clamp(max=N - 1)
        column_BN = (is_first_BN.cumsum(1) - 1).gather(1, first_BN)

        on_path_BMN = draft.ancestors_BNN.gather(1, node_BM[..., None].expand(-1, -1, N))
        above_BMN = torch.where(on_path_BMN, column_BN[:, None], M)
        ancestors_BMM = on_path_BMN.new_zeros(B, M, M + 1).scatter_(2, above_BMN, True)[..., :M]
        return cls(node_BM, column_BN, ancestors_BMM, draft.depth_BN.gather(1, node_BM))

    def spread(self, logits_BMV: Tensor) -> Tensor:
        """What a pass said of its columns, for every node: (B, N, V)."""
        if self.column_BN is self.node_BM:
            return logits_BMV
        B, M, _ = logits_BMV.shape
        first_B1 = torch.arange(0, B * M, M, device=logits_BMV.device)[:, None]
        return logits_BMV.flatten(0, 1)[first_B1 + self.column_BN]


def _first_of_path(draft: Draft) -> Tensor:
    """The first node with the same path of tokens, (B, N); 0 for nodes that are not there."""
    B, N = draft.tokens_BN.shape
    D = int(draft.depth_BN.max()) + 1
    depth_BNN = torch.where(draft.ancestors_BNN, draft.depth_BN[:, None], D)
    path_BND = draft.tokens_BN.new_full((B, N, D + 1), -1)
    path_BND = path_BND.scatter_(2, depth_BNN, draft.tokens_BN[:, None].expand(B, N, N))[..., :D]
    same_BNN = (path_BND[:, :, None] == path_BND[:, None]).all(3) & draft.mask_BN[:, None]
    number_N = torch.arange(N, device=same_BNN.device)
    return torch.where(same_BNN, number_N, N).amin(2) * draft.mask_BN
