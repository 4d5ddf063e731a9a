"""The encoder of an encoder-decoder as a program of symbolic sizes: rows, and tokens of the source.

It ends where the sources enter the decoder: it writes each layer's cross-attention keys and values
to KV buffers that are there already. So no other program differs for the first forward pass of a
decoder, which is one like those after it.

Legend: B rows, S tokens of the source, W hidden width of the encoder, X numbers of all keys and
values of a token.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.runtime.executors.traced import TreeForward
from outrider.runtime.executors.traced_cache import ROWS, SOURCE_SPAN, KVBuffers


class SourcesForward(TreeForward):
    """A forward pass of the encoder. The mask of the sources among the KV buffers
    (``traced_cache.py``) says how many tokens each row has."""

    kind: ClassVar[str] = "encoder"

    @property
    def num_moving(self) -> int:
        return 1

    def forward(  # type: ignore[override]
        self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor]:
        """The encoder's output, (B, S, W)."""
        return (self.write_sources(tokens_BS, keys, values),)

    def grouped(self, moving: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple(moving)

    def results(
        self, outputs: Sequence[Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Sequence[Tensor]:
        """The keys and values that it wrote, (B, S, X)."""
        half, span = len(keys) // 2, values[-1].shape[3]
        written = [*keys[half:], *values[half:-1]]
        return [torch.cat([each[:, :, :span].transpose(1, 2).flatten(2) for each in written], 2)]

    def fill(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        """Nothing: it reads no keys and values."""

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        keys, values = self._empty(buffers, rows, slots)
        shape = rows, values[-1].shape[3]
        tokens_BS = torch.zeros(shape, dtype=torch.int64, device=values[-1].device)
        return tokens_BS, keys, values

    def sizes(self) -> tuple[Any, ...]:
        return ({0: ROWS, 1: SOURCE_SPAN},)
