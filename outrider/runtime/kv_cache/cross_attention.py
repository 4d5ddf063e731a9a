"""The cache of an encoder-decoder: the decoder's own tokens, and the encoded source.

A row's source is encoded once, and the encoder's output turned into each layer's cross-attention
keys and values: by the decoder's first forward pass, or where the model is compiled by the
encoder's program. They never change afterwards, and are padded to the
longest source. Only the decoder's self-attention is rolled back; that part is an ordinary KV cache.

The KV buffers of sources store numbers as the model computes them, whatever the other KV buffers
do: cross-attention reads them as they are.

Legend: B rows, S slots of the source, H heads, C width of a head, W hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from outrider.core.context import Context
from outrider.core.lengths import Lengths
from outrider.runtime.attention_metadata import padding_mask
from outrider.runtime.kv_cache.cache import PLAIN, KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan, KVLayout


@dataclass(frozen=True)
class CrossLayer:
    """One layer's keys and values of the sources, both (B, H, S, C), as cross-attention reads
    them."""

    keys: Tensor
    values: Tensor


class CrossAttentionCache(KVCache):
    """Keys and values of the sources; ``lengths`` are the lengths of the sources."""

    layers: list[CrossLayer]  # type: ignore[assignment]

    def __init__(
        self, context: Context, num_layers: int, lengths: Sequence[int], plan: KVCachePlan = PLAIN
    ) -> None:
        super().__init__(context, num_layers, max(lengths), KVCachePlan("auto", plan.memory_budget))
        self.begin(max(lengths))
        self._sources = Lengths.of(lengths, context.device)

    def append_sources(self) -> None:
        """Keeps the sources, which have been written in all layers."""
        self.append(self._sources)
        self._show()

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._show()

    def join(self, other: KVCache) -> None:
        self.limit = max(self.limit, other.limit)
        super().join(other)
        self._show()

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Which slots hold the row's source, as an additive mask (B, 1, 1, S)."""
        return padding_mask(self.length_B, self.span, dtype)

    def _show(self) -> None:
        """Cuts the layers that the model reads to the rows and slots in use."""
        self.span = max(self.lengths, default=0)
        rows, slots = slice(self.num_rows), slice(self.span)
        self.layers = [
            CrossLayer(keys[rows, :, slots], values[rows, :, slots])
            for keys, values in zip(self.keys, self.values, strict=True)
            if keys is not None and values is not None
        ]


class Seq2SeqCache(KVCache):
    """The KV cache of the decoder's own tokens, with the sources beside it.

    Args:
        context: the batch, which has ``sources``.
        num_layers: layers of the decoder.
        limit: most slots per row for the decoder's own tokens.
        dtype: of masks.
        plan: how the decoder's own KV buffers store numbers, and how much memory all KV buffers
            may take.

    Attributes:
        cross: keys and values of the sources.
        states_BSW: the encoder's output while the decoder's first forward pass is to read it; else
            a tensor of width 0, since the model still asks for its shape.
        mask_B11S: which slots hold the row's source.
    """

    can_lead = False

    def __init__(
        self,
        context: Context,
        num_layers: int,
        limit: int,
        dtype: torch.dtype,
        plan: KVCachePlan = PLAIN,
    ) -> None:
        super().__init__(context, num_layers, limit, plan)
        assert context.sources is not None
        lengths = [len(source) for source in context.sources]
        self.cross = CrossAttentionCache(context, num_layers, lengths, plan)
        self._dtype = dtype
        self._all_in_use: tuple[list[Tensor], list[Tensor]] | None = None
        length_B, span = torch.tensor(lengths, device=context.device), max(lengths)
        self.mask_B11S = padding_mask(length_B, span, dtype)
        self.states_BSW = self.mask_B11S.new_empty(context.num_rows, span, 0)

    @property
    def both(self) -> EncoderDecoderCache:
        """Both caches as ``transformers`` takes them. Made anew for each forward pass: kept here,
        it would be a reference cycle."""
        return EncoderDecoderCache(self, self.cross)

    def in_use(self) -> list[Tensor]:
        """As ``KVCache.in_use``: the KV buffers of cross-attention after the decoder's own on
        either side, and the mask of the sources at the end."""
        own = self.own_in_use()
        if self._all_in_use is None or self._all_in_use[0] is not own:
            half, cross = len(own) // 2, self.cross.in_use()
            keys, values = own[:half] + cross[:half], own[half:] + cross[half:]
            self._all_in_use = own, [*keys, *values, self.mask_B11S]
        return self._all_in_use[1]

    def reserve_all(self, own: KVLayout, cross: KVLayout) -> None:
        """Allocates the KV buffers of the sources and of the decoder's first token, which a
        compiled program cannot do itself.

        Args:
            own: the shapes of the decoder's own KV buffers.
            cross: those of cross-attention.
        """
        self.reserve(self.num_rows, 1, own)
        self.cross.reserve(self.num_rows, self.mask_B11S.shape[3], cross)

    def drop_encoder_output(self) -> None:
        """Forgets the encoder's output, once it has been turned into keys and values."""
        self.cross.append_sources()
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
        self._all_in_use = None
        self.mask_B11S = self.cross.mask(self._dtype)
        self.states_BSW = self.states_BSW.new_empty(self.num_rows, self.cross.span, 0)
