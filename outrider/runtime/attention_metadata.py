"""Slots, positions and masks of a forward pass: computed here for eager and compiled code alike.

The query tokens of a forward pass are written to the slots that follow a row's committed tokens. A
chain's tokens have the positions of their slots; a tree's nodes have the committed length plus
their depth.

Masks are additive, ``(B, 1, N, S)``: 0 where a query token attends to a slot, the least finite
number where it does not.

Legend: B rows, N query tokens, M nodes after the committed tokens, S slots that are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.recording import is_recorded
from outrider.runtime.hf.longrope import marked
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.storage import query_slots


@dataclass(frozen=True)
class Nodes:
    """The query tokens of a forward pass, as the last N of M nodes after the committed slots.

    Attributes:
        ancestors_BNM: ``[b, i, j]`` is true iff node j is query token i's node or an ancestor
            of it.
        depth_BM: edges between each node and the last committed token, less one: 0 for a node
            that follows it.
    """

    ancestors_BNM: Tensor
    depth_BM: Tensor

    @property
    def first(self) -> int:
        """Nodes that earlier forward passes wrote."""
        return self.ancestors_BNM.shape[2] - self.ancestors_BNM.shape[1]


class AttentionMetadata(NamedTuple):
    """Where the query tokens of a forward pass stand, and what they attend to.

    Attributes:
        slots_BN: the slot that each query token's keys and values are written to.
        positions_BN: the position that the model is told for each query token.
        masks: additive masks (B, 1, N, S), one per kind of layer.
        slot_BS: position of the token in each slot, those of the query tokens included; None where
            the model is not told.
    """

    slots_BN: Tensor
    positions_BN: Tensor
    masks: Mapping[str, Tensor]
    slot_BS: Tensor | None = None

    @property
    def mask(self) -> Tensor | Mapping[str, Tensor]:
        """The masks as a ``transformers`` model takes them: a mapping where layers differ."""
        return self.masks if len(self.masks) > 1 else next(iter(self.masks.values()))


@dataclass(frozen=True)
class AttentionSpec:
    """What positions and masks depend on besides the batch.

    Attributes:
        windows: how many positions each kind of layer attends to, None for all; each kind has a
            mask.
        limit: longest context in tokens.
        dtype: of the masks.
        original: longest sequence with short rotary factors (``hf/longrope.py``); None where all
            sequences have the same.
        tells_slots: whether the model is told the positions of all slots as well, as one with
            relative positions is (``hf/positions.py``).
        reads_sources: whether the model has cross-attention, whose keys and values follow its own
            among the KV buffers (``executors/traced_cache.py``).
    """

    windows: Mapping[str, int | None]
    limit: int
    dtype: torch.dtype
    original: int | None = None
    tells_slots: bool = False
    reads_sources: bool = False

    def metadata(
        self,
        length_B: Tensor,
        num_queries: int,
        span: int,
        nodes: Nodes | None = None,
        *,
        sees_all: bool = False,
    ) -> AttentionMetadata:
        """Slots, positions and masks of query tokens after so many committed slots.

        Args:
            length_B: committed slots of each row.
            num_queries: query tokens of each row.
            span: slots that the forward pass reads.
            nodes: topology of the query tokens; None for a chain.
            sees_all: whether every query token is known to attend to all slots that are read,
                where no window hides them.
        """
        first = 0 if nodes is None else nodes.first
        slots_BN = positions_BN = query_slots(length_B, first, num_queries)
        if nodes is not None:
            positions_BN = length_B[:, None] + nodes.depth_BM[:, first:]
        masks = {
            kind: attention_mask(
                positions_BN, nodes, length_B, span, self.dtype, window, sees_all=sees_all
            )
            for kind, window in self.windows.items()
        }
        slot_BS = slot_positions(nodes, length_B, span) if self.tells_slots else None
        # Tokens beyond the context are computed with the others of their row, and never emitted.
        return AttentionMetadata(slots_BN, positions_BN.clamp(max=self.limit - 1), masks, slot_BS)

    def metadata_of(self, cache: KVCache, N: int, nodes: Nodes | None = None) -> AttentionMetadata:
        """Slots, positions and masks of the forward pass that a cache has begun.

        Args:
            cache: the cache that is read and written.
            N: query tokens of each row.
            nodes: topology of the query tokens; None for a chain.
        """
        alone = N == 1 and (nodes is None or not nodes.first)
        metadata = self.metadata(
            cache.length_B, N, cache.span, nodes, sees_all=alone and cache.is_uniform
        )
        if self.original is None:
            return metadata
        positions_BN = marked(metadata.positions_BN, cache.long, self.original)
        return metadata._replace(positions_BN=positions_BN)


def chain_mask(
    positions_BN: Tensor, span: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Slot s is visible from position t iff ``s <= t`` (and ``t - s < window``)."""
    slots_S = torch.arange(span, device=positions_BN.device)
    hidden_BNS = slots_S > positions_BN[..., None]
    if window is not None:
        hidden_BNS = hidden_BNS | (slots_S <= positions_BN[..., None] - window)
    return _additive(hidden_BNS, dtype)


def tree_mask(
    nodes: Nodes,
    length_B: Tensor,
    span: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Every committed slot is visible, and of the nodes after them the ancestors and the node
    itself."""
    B, N, M = nodes.ancestors_BNM.shape
    reads = length_B.device.type == "cpu" and not is_recorded()
    if window is None and reads and (length_B == span - M).all():
        mask_BNS = torch.zeros(B, N, span, dtype=dtype)  # the nodes are the last slots of each row
        mask_BNS[..., span - M :].masked_fill_(~nodes.ancestors_BNM, torch.finfo(dtype).min)
        return mask_BNS[:, None]
    slots_S = torch.arange(span, device=length_B.device)
    node_BS = slots_S - length_B[:, None]
    index_BNS = node_BS.clamp(0, M - 1)[:, None].expand(-1, N, -1)
    is_node_BS = (node_BS >= 0) & (node_BS < M)
    on_path_BNS = nodes.ancestors_BNM.gather(2, index_BNS) & is_node_BS[:, None]
    visible_BNS = (node_BS < 0)[:, None] | on_path_BNS
    if window is not None:
        positions_BM = length_B[:, None] + nodes.depth_BM
        position_BS = slot_positions(nodes, length_B, span)
        visible_BNS = visible_BNS & (
            position_BS[:, None] > positions_BM[:, nodes.first :, None] - window
        )
    return _additive(~visible_BNS, dtype)


def attention_mask(
    positions_BN: Tensor,
    nodes: Nodes | None,
    length_B: Tensor,
    span: int,
    dtype: torch.dtype,
    window: int | None = None,
    *,
    sees_all: bool = False,
) -> Tensor:
    """The mask of one kind of layer.

    Args:
        positions_BN: position of each query token.
        nodes: topology of the query tokens; None where each follows the one before.
        length_B: committed slots of each row.
        span: slots that are read.
        dtype: of the mask.
        window: how many positions a query token attends to; None for all.
        sees_all: whether every query token is known to attend to all slots that are read, where
            no window hides them. Saves the comparisons, which plain decoding would make in every
            forward pass.
    """
    if sees_all and window is None:
        B, N = positions_BN.shape
        nothing = torch.zeros(1, 1, 1, span, dtype=dtype, device=positions_BN.device)
        return nothing.expand(B, 1, N, span)
    if nodes is None:
        return chain_mask(positions_BN, span, dtype, window)
    return tree_mask(nodes, length_B, span, dtype, window)


def padding_mask(length_B: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """Slot s of a row is visible from every query token iff ``s < length``; (B, 1, 1, S)."""
    slots_S = torch.arange(span, device=length_B.device)
    return _additive((slots_S >= length_B[:, None])[:, None], dtype)


def slot_positions(nodes: Nodes | None, length_B: Tensor, span: int) -> Tensor:
    """The position of the token in each slot: the slot's number, or for a node its depth after the
    committed length. (B, S); (1, S) without nodes, since it is the same in all rows."""
    slots_S = torch.arange(span, device=length_B.device)
    if nodes is None:
        return slots_S[None]
    M = nodes.depth_BM.shape[1]
    node_BS = slots_S - length_B[:, None]
    position_BS = length_B[:, None] + nodes.depth_BM.gather(1, node_BS.clamp(0, M - 1))
    return torch.where((node_BS >= 0) & (node_BS < M), position_BS, slots_S)


def _additive(hidden_BNS: Tensor, dtype: torch.dtype) -> Tensor:
    mask_BNS = torch.zeros(hidden_BNS.shape, dtype=dtype, device=hidden_BNS.device)
    return mask_BNS.masked_fill_(hidden_BNS, torch.finfo(dtype).min)[:, None]
