"""The query tokens of a target forward pass over a draft: one per node, or one per distinct path.

Independent draws repeat themselves: where the draft distribution is peaked, most siblings hold the
same token. To the verification rules they are several draws; to the target they are one token,
whose logits and keys serve all of them.

Merging equal paths takes a device-to-host synchronisation, because the number of query tokens is
only known on the device. On a CPU that is free, and the host merges them: a loop over a few nodes
takes less time than the thirty small operations of the tensors' form. On other devices it costs
more than the query tokens saved, so there every node stays a query token of its own.

Legend: B rows, N nodes, D depths, Q query tokens (the most that any row needs), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.chain import cached_arange


@dataclass(frozen=True)
class QueryTokens:
    """The query tokens of a forward pass over a draft.

    Attributes:
        node_BQ: the node of each query token; a row that needs fewer than Q repeats one at the end.
        index_BN: the query token of each node: that of the first node with the same path of
            tokens, and the root's for nodes that do not exist.
        ancestors_BQQ: ``[b, i, j]`` is true iff query token j is i or an ancestor of i.
        depth_BQ: number of edges between each query token's node and the root.
    """

    node_BQ: Tensor
    index_BN: Tensor
    ancestors_BQQ: Tensor
    depth_BQ: Tensor

    @classmethod
    def one_per_node(cls, ancestors_BNN: Tensor, depth_BN: Tensor) -> "QueryTokens":
        """Every node is a query token."""
        node_BN = cached_arange(depth_BN.shape[1], depth_BN.device).expand_as(depth_BN)
        return cls(node_BN, node_BN, ancestors_BNN, depth_BN)

    @classmethod
    def one_per_path(
        cls, tokens_BN: Tensor, mask_BN: Tensor, ancestors_BNN: Tensor, depth_BN: Tensor
    ) -> "QueryTokens":
        """Nodes with the same path of tokens share a query token, unless no row can spare one.

        Synchronises with the device. Arguments as in :class:`outrider.core.Draft`.
        """
        B, N = tokens_BN.shape
        first_BN = _first_of_path(tokens_BN, mask_BN, ancestors_BNN, depth_BN)
        node_N = torch.arange(N, device=first_BN.device)
        is_first_BN = first_BN == node_N
        Q = int(is_first_BN.sum(1).max())
        if Q == N:
            return cls.one_per_node(ancestors_BNN, depth_BN)
        node_BQ = torch.where(is_first_BN, node_N, N).sort(1).values[:, :Q].clamp(max=N - 1)
        index_BN = (is_first_BN.cumsum(1) - 1).gather(1, first_BN)

        on_path_BQN = ancestors_BNN.gather(1, node_BQ[..., None].expand(-1, -1, N))
        above_BQN = torch.where(on_path_BQN, index_BN[:, None], Q)
        ancestors_BQQ = on_path_BQN.new_zeros(B, Q, Q + 1).scatter_(2, above_BQN, True)[..., :Q]
        return cls(node_BQ, index_BN, ancestors_BQQ, depth_BN.gather(1, node_BQ))

    @classmethod
    def one_per_path_on_host(
        cls, tokens_BN: Tensor, mask_BN: Tensor, parents: Sequence[Sequence[int]]
    ) -> "QueryTokens | None":
        """As :meth:`one_per_path`, computed by the host from the parents of each row's nodes; None
        where no row can spare a query token."""
        N = tokens_BN.shape[1]
        rows = [
            _MergedRow.of(*row)
            for row in zip(tokens_BN.tolist(), mask_BN.tolist(), parents, strict=True)
        ]
        Q = max(len(row.first) for row in rows)
        if Q == N:
            return None
        nodes, depths, ancestors = [], [], bytearray()
        for row in rows:
            chosen = row.first + [N - 1] * (Q - len(row.first))
            nodes.append(chosen)
            depths.append([row.depth[i] for i in chosen])
            for i in chosen:
                ancestors += row.above[i][:Q]
        return cls(
            torch.tensor(nodes),
            torch.tensor([row.index for row in rows]),
            torch.frombuffer(ancestors, dtype=torch.bool).view(-1, Q, Q),
            torch.tensor(depths),
        )

    def to_nodes(self, logits_BQV: Tensor) -> Tensor:
        """The logits of every node, (B, N, V), from those of the query tokens."""
        if self.index_BN is self.node_BQ:
            return logits_BQV
        B, Q, V = logits_BQV.shape
        index_BN = self.index_BN
        if B > 1:
            index_BN = index_BN + cached_arange(B, logits_BQV.device, Q)[:, None]
        return logits_BQV.flatten(0, 1).index_select(0, index_BN.flatten()).view(B, -1, V)


@dataclass(frozen=True)
class _MergedRow:
    """One row's nodes and query tokens, by index.

    Attributes:
        first: the node of each query token.
        index: the query token of each node.
        above: of each node, which query tokens are its own or an ancestor's, a byte each.
        depth: of each node.
    """

    first: list[int]
    index: list[int]
    above: list[bytearray]
    depth: list[int]

    @classmethod
    def of(cls, tokens: list[int], exists: list[bool], parents: Sequence[int]) -> "_MergedRow":
        N = len(tokens)
        first, index, depth = [0], [0], [0]
        root = bytearray(N)
        root[0] = 1
        above = [root]
        number: dict[tuple[int, int], int] = {}
        for i in range(1, N):
            parent, query = max(parents[i], 0), 0
            if exists[i]:
                query = number.setdefault((index[parent], tokens[i]), len(first))
                if query == len(first):
                    first.append(i)
            index.append(query)
            depth.append(depth[parent] + 1)
            path = above[parent][:]
            path[query] = 1
            above.append(path)
        return cls(first, index, above, depth)


def _first_of_path(
    tokens_BN: Tensor, mask_BN: Tensor, ancestors_BNN: Tensor, depth_BN: Tensor
) -> Tensor:
    """The first node with the same path of tokens, (B, N); 0 for nodes that do not exist."""
    B, N = tokens_BN.shape
    D = int(depth_BN.max()) + 1
    depth_BNN = torch.where(ancestors_BNN, depth_BN[:, None], D)
    path_BND = tokens_BN.new_full((B, N, D + 1), -1)
    path_BND = path_BND.scatter_(2, depth_BNN, tokens_BN[:, None].expand(B, N, N))[..., :D]
    same_BNN = (path_BND[:, :, None] == path_BND[:, None]).all(3) & mask_BN[:, None]
    node_N = torch.arange(N, device=same_BNN.device)
    return torch.where(same_BNN, node_N, N).amin(2) * mask_BN
