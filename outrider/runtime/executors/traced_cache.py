"""KV buffers as compiled programs take them: two lists of tensors, keys and values.

Each has a KV buffer (B, H, S, C) per layer. For a decoder that reads sources
(``AttentionSpec.reads_sources``), those of its cross-attention follow: as many buffers again, with
slots of their own. The last of the values is then the mask of the sources, (B, 1, 1, S), whose
width says how many of these slots are read. In that order ``Seq2SeqCache.in_use`` has them.

So every program, fused drafts included, serves decoder-only models and decoders alike.

Legend: B rows, N query tokens, H heads, S slots, C width of a head.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.export import Dim
from transformers.cache_utils import Cache, EncoderDecoderCache

from outrider.runtime.kv_cache.cross_attention import CrossLayer
from outrider.runtime.kv_cache.storage import write_at

ROWS, SLOTS = Dim("rows"), Dim("slots")
_SOURCE_SLOTS, SOURCE_SPAN = Dim("source_slots"), Dim("source_span")
_MORE_SLOTS, _LESS_SPAN = 7, 2
"""Sizes of example sources differ from those of the decoder's own KV buffers, lest the tracer take
two sizes for one."""

KVBuffers = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values."""

T = TypeVar("T")


class TracedKVCache(Cache):
    """The KV buffers inside the program: every row writes at its own slots.

    Args:
        keys, values: the KV buffers, by layer.
        slots_BN: where query tokens are written.
        span: slots that are read.

    Attributes:
        keys, values, slots_BN, span: as given.
        resume_BNH: the hidden states that a forward pass without the first layers goes on from
            (``hf/early_exit.py``); None where it runs all layers.
    """

    is_compileable = False
    resume_BNH: Tensor | None = None

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots_BN: Tensor, span: int):
        super().__init__(layers=[])
        self.keys, self.values, self.slots_BN, self.span = keys, values, slots_BN, span
        self._rows_B1 = torch.arange(slots_BN.shape[0], device=slots_BN.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        write_at(self.keys[layer_idx], self._rows_B1, self.slots_BN, key_states)
        write_at(self.values[layer_idx], self._rows_B1, self.slots_BN, value_states)
        return self.read(layer_idx)

    def place(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """The KV buffers of a layer and the slots (B, N) of the query tokens, for a kernel that
        writes there itself."""
        return self.keys[layer_idx], self.values[layer_idx], self.slots_BN

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer that query tokens attend to, (B, H, S, C) each."""
        rows = self.slots_BN.shape[0]
        buffers = self.keys[layer_idx], self.values[layer_idx]
        keys, values = (buffer[:rows, :, : self.span] for buffer in buffers)
        return keys, values

    @cached_property
    def slot_S(self) -> Tensor:
        """The numbers of the slots that are read."""
        return torch.arange(self.span, device=self.slots_BN.device)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.span, 0


class TracedSeq2SeqCache(TracedKVCache):
    """The same of a decoder that reads sources, as ``Seq2SeqCache`` outside programs.

    Args:
        keys, values: with those of cross-attention, and the mask of the sources.
        slots_BN: where query tokens are written.
        span: slots that are read.
        states_BSW: the encoder's output, where cross-attention is to write its keys and values;
            None where they are there.

    Attributes:
        states_BSW: as given; of width 0 for None.
        mask_B11S: which slots hold the row's source.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        slots_BN: Tensor,
        span: int,
        states_BSW: Tensor | None = None,
    ) -> None:
        num_layers = len(keys) // 2
        super().__init__(keys[:num_layers], values[:num_layers], slots_BN, span)
        self.mask_B11S = values[-1]
        width = self.mask_B11S.shape[3]
        pairs = zip(keys[num_layers:], values[num_layers:-1], strict=True)
        layers = [CrossLayer(key[:, :, :width], value[:, :, :width]) for key, value in pairs]
        self._cross = _TracedCrossAttention(layers, is_written=states_BSW is None)
        if states_BSW is None:
            states_BSW = self.mask_B11S.new_empty(slots_BN.shape[0], width, 0)
        self.states_BSW = states_BSW

    @property
    def both(self) -> EncoderDecoderCache:
        """Both caches as ``transformers`` takes them."""
        return EncoderDecoderCache(self, self._cross)


class _TracedCrossAttention(Cache):
    """Keys and values of the sources inside the program."""

    is_compileable = False
    layers: list[CrossLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[CrossLayer], *, is_written: bool) -> None:
        super().__init__(layers=[])
        self.layers = layers
        self._is_written = is_written

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        layer.keys.copy_(key_states)
        layer.values.copy_(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._is_written)


def halves(buffers: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Keys and values from one sequence of all."""
    half = len(buffers) // 2  # the mask of the sources is one of the values
    return buffers[:half], buffers[half:]


def varying(buffers: KVBuffers, *, reads_sources: bool) -> list[list[dict[int, Any]]]:
    """Which sizes of KV buffers vary."""
    own: dict[int, Any] = {0: ROWS, 2: SLOTS}
    keys, values = buffers
    if not reads_sources:
        return [[own] * len(keys), [own] * len(values)]
    half = len(keys) // 2
    both = [own] * half + [{0: ROWS, 2: _SOURCE_SLOTS}] * half
    return [both, [*both, {0: ROWS, 3: SOURCE_SPAN}]]


def empty_buffers(
    buffers: KVBuffers, rows: int, slots: int, *, reads_sources: bool
) -> list[list[Tensor]]:
    """Empty KV buffers of so many rows and slots, otherwise like the ones given. Sources have
    different lengths, and the last row's buffers have slots beyond them."""
    keys, values = buffers
    if not reads_sources:
        return [_like(side, rows, slots) for side in buffers]
    half, num_sources = len(keys) // 2, slots + _MORE_SLOTS
    *values, mask_B11S = values
    found = [
        _like(side[:half], rows, slots) + _like(side[half:], rows, num_sources)
        for side in (keys, values)
    ]
    width = slots - _LESS_SPAN
    length_B = (width - 2 * torch.arange(rows, device=mask_B11S.device)).clamp(min=1)
    hidden_BS = torch.arange(width, device=mask_B11S.device) >= length_B[:, None]
    empty_B11S = mask_B11S.new_zeros(rows, 1, 1, width)
    found[1].append(
        empty_B11S.masked_fill(hidden_BS[:, None, None], torch.finfo(mask_B11S.dtype).min)
    )
    return found


def _like(buffers: Sequence[Tensor], rows: int, slots: int) -> list[Tensor]:
    return [buffer.new_zeros(rows, buffer.shape[1], slots, buffer.shape[3]) for buffer in buffers]
