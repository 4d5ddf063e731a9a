"""Slots, positions and masks of a forward pass: computed here for eager and compiled code alike.

The query tokens of a forward pass are written behind a row's committed slots. A chain's tokens have
the positions of their slots; a tree's nodes have the committed length plus their depth.

Legend: B rows, N query tokens, S slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf.longrope import marked
from outrider.runtime.kv_cache.slots import slots_behind
from outrider.runtime.masks import Nodes, attention_mask


class AttentionMetadata(NamedTuple):
    """Where the query tokens of a forward pass stand, and what they attend to.

    Attributes:
        slots_BN: the slot that each query token's keys and values are written to.
        positions_BN: the position that the model is told for each query token.
        masks: additive masks (B, 1, N, S), one per kind of layer.
    """

    slots_BN: Tensor
    positions_BN: Tensor
    masks: Mapping[str, Tensor]

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
    """

    windows: Mapping[str, int | None]
    limit: int
    dtype: torch.dtype
    original: int | None = None

    def metadata(
        self,
        length_B: Tensor,
        num_queries: int,
        span: int,
        nodes: Nodes | None = None,
        *,
        sees_all: bool = False,
    ) -> AttentionMetadata:
        """Slots, positions and masks of query tokens behind so many committed slots.

        Args:
            length_B: committed slots of each row.
            num_queries: query tokens of each row.
            span: slots that the forward pass reads.
            nodes: topology of the query tokens; None for a chain.
            sees_all: whether every query token is known to attend to all slots that are read,
                where no window hides them.
        """
        first = 0 if nodes is None else nodes.first
        slots_BN = positions_BN = slots_behind(length_B, first, num_queries)
        if nodes is not None:
            positions_BN = length_B[:, None] + nodes.depth_BM[:, first:]
        masks = {
            kind: attention_mask(
                positions_BN, nodes, length_B, span, self.dtype, window, sees_all=sees_all
            )
            for kind, window in self.windows.items()
        }
        # Tokens beyond the context are computed with the others of their row, and never emitted.
        return AttentionMetadata(slots_BN, positions_BN.clamp(max=self.limit - 1), masks)

    def metadata_of(self, batch: ForwardBatch) -> AttentionMetadata:
        """Slots, positions and masks of a batch whose forward pass has begun."""
        cache, nodes = batch.cache, batch.nodes
        N = batch.tokens_BN.shape[1]
        alone = N == 1 and (nodes is None or not nodes.first)
        metadata = self.metadata(
            cache.length_B, N, cache.span, nodes, sees_all=alone and cache.is_uniform
        )
        if self.original is None:
            return metadata
        positions_BN = marked(metadata.positions_BN, cache.long, self.original)
        return AttentionMetadata(metadata.slots_BN, positions_BN, metadata.masks)
