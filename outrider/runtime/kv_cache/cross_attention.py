"""The cache of an encoder-decoder: what the decoder wrote, and what it reads of the source.

A row's source is encoded once. Each layer's keys and values of it (cross-attention) are written by
the decoder's first pass, stay as they are, and are padded to the longest source; only the decoder's
self-attention is rolled back, and that part is the ordinary KV buffer cache. A source's KV buffers
store what the model computed, whatever the others do: they are read as they are, in every pass.

Legend: B rows, S slots of the source, H heads, C width of a head, W hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from outrider.core.context import Context
from outrider.runtime.kv_cache.cache import PLAIN, KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan
from outrider.runtime.masks import padding_mask


@dataclass(frozen=True)
class CrossLayer:
    """One layer's source, as the model's cross-attention reads it: both (B, H, S, C)."""

    keys: Tensor
    values: Tensor


class CrossAttentionCache(KVCache):
    """Keys and values of the sources; ``lengths`` are the sources' own."""

    layers: list[CrossLayer]  # type: ignore[assignment]

    def __init__(
        self, context: Context, num_layers: int, lengths: Sequence[int], plan: KVCachePlan = PLAIN
    ) -> None:
        super().__init__(context, num_layers, max(lengths), KVCachePlan("auto", plan.memory_budget))
        self.begin(max(lengths))
        self._sources = list(lengths)

    def settle(self) -> None:
        """Says that all layers are written, and until rows change what they hold."""
        self.lengths = list(self._sources)
        self.length_B = torch.tensor(self.lengths, device=self.length_B.device)
        self._show()

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._show()

    def join(self, other: KVCache) -> None:
        self.limit = max(self.limit, other.limit)
        super().join(other)
        self._show()

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Which slots of its source a row may look at, (B, 1, 1, S)."""
        return padding_mask(self.length_B, self.span, dtype)

    def _show(self) -> None:
        self.span = max(self.lengths, default=0)
        rows, slots = slice(self.num_rows), slice(self.span)
        self.layers = [
            CrossLayer(keys[rows, :, slots], values[rows, :, slots])
            for keys, values in zip(self.keys, self.values, strict=True)
            if keys is not None and values is not None
        ]


class Seq2SeqCache(KVCache):
    """A KV buffer cache of the decoder's own tokens, with the sources beside it.

    Args:
        context: the batch; its ``sources`` are what was encoded.
        num_layers: layers of the decoder.
        limit: most slots per row for the decoder's own tokens.
        dtype: of masks.
        plan: how the decoder's own KV buffers store numbers, and how much all of them may.

    Attributes:
        cross: the sources' keys and values.
        states_BSW: the encoder's output until the first pass has read it; afterwards of no width,
            since only its shape is looked at.
        mask_B11S: which slots of its source a row may look at.
    """

    def __init__(
        self,
        context: Context,
        num_layers: int,
        limit: int,
        states_BSW: Tensor,
        dtype: torch.dtype,
        plan: KVCachePlan = PLAIN,
    ) -> None:
        super().__init__(context, num_layers, limit, plan)
        assert context.sources is not None
        lengths = [len(source) for source in context.sources]
        self.cross = CrossAttentionCache(context, num_layers, lengths, plan)
        self.states_BSW = states_BSW
        self._dtype = dtype
        length_B = torch.tensor(lengths, device=states_BSW.device)
        self.mask_B11S = padding_mask(length_B, states_BSW.shape[1], dtype)

    @property
    def both(self) -> EncoderDecoderCache:
        """What the model is given; made anew, for it would keep this cache alive from inside."""
        return EncoderDecoderCache(self, self.cross)

    def settle(self) -> None:
        """Forgets the encoder's output, once a pass has turned it into keys and values."""
        self.cross.settle()
        self._rows_changed()

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.cross.keep(rows)
        self._rows_changed()

    def join(self, other: KVCache) -> None:
        assert isinstance(other, Seq2SeqCache)
        super().join(other)
        self.cross.join(other.cross)
        self._rows_changed()

    def num_bytes(self) -> int:
        return super().num_bytes() + self.cross.num_bytes()

    def _rows_changed(self) -> None:
        self.mask_B11S = self.cross.mask(self._dtype)
        self.states_BSW = self.states_BSW.new_empty(self.num_rows, self.cross.span, 0)
