"""A model's pass as a program of symbolic sizes: rows, tokens per row, slots allocated, slots read.

One program serves every draft length, batch, context and KV buffer. It is traced by
``torch.export``, from the model's own code, with our KV buffers and masks in place of those of
``transformers``.

Legend: B rows, N columns of a pass, S slots read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers.cache_utils import Cache

from outrider.runtime.health import health_of
from outrider.runtime.masks import chain_mask

_SIZES = 3, 5, 23, 40
"""Rows, columns, span and slots to trace with: all differ, lest two be taken for one."""


ROWS, COLUMNS, SPAN, SLOTS = Dim("rows"), Dim("columns"), Dim("span"), Dim("slots")

KVBuffers = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values, a KV buffer (B, H, S, C) per layer."""


class _TracedKVCache(Cache):
    """The KV buffers of a pass inside the program: every row writes at its own slots."""

    is_compileable = False

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots_BN: Tensor, span: int):
        super().__init__(layers=[])
        self._keys, self._values, self._span = keys, values, span
        self._slots_BN = slots_BN
        self._rows_B1 = torch.arange(slots_BN.shape[0], device=slots_BN.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return (
            self._write(self._keys[layer_idx], key_states),
            self._write(self._values[layer_idx], value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._span, 0

    def _write(self, buffer: Tensor, new_BHNC: Tensor) -> Tensor:
        buffer[self._rows_B1, :, self._slots_BN] = new_BHNC.transpose(1, 2)
        return buffer[: new_BHNC.shape[0], :, : self._span]


class TreePass(nn.Module):
    """A pass over columns whose places and masks are given, as those of a tree are.

    Args:
        module: the model.
        windows: what each kind of layer sees, None for everything; each kind has a mask.
        limit: its longest context in tokens.
    """

    kind: ClassVar[str] = "tree"
    """What messages call its program."""

    def __init__(
        self, module: nn.Module, windows: Mapping[str, int | None], limit: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.module = module
        self.windows = dict(windows)
        self.limit, self.dtype = limit, dtype

    def extra_repr(self) -> str:
        """All that its program depends on besides the model."""
        return f"windows={self.windows}, limit={self.limit}, dtype={self.dtype}"

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, N, V) and a number per row (B,), finite iff they are healthy."""
        mask = dict(zip(self.windows, masks, strict=True)) if len(masks) > 1 else masks[0]
        logits_BNV: Tensor = self.module(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=_TracedKVCache(keys, values, slots_BN, masks[0].shape[-1]),
            use_cache=True,
        ).logits
        return logits_BNV, health_of(logits_BNV)

    @property
    def num_moving(self) -> int:
        """How many tensors the inputs have before the KV buffers."""
        return 3 + len(self.windows)

    def inputs(
        self, buffers: KVBuffers, rows: int, columns: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        """Inputs of these sizes, with empty KV buffers like the ones given."""
        tokens_BN, places_BN = _example_columns(buffers, rows, columns, span)
        masks = [
            tokens_BN.new_zeros(rows, 1, columns, span, dtype=self.dtype) for _ in self.windows
        ]
        return tokens_BN, places_BN.clone(), places_BN, masks, *_empty(buffers, rows, slots)

    def sizes(self) -> tuple[Any, ...]:
        """Which sizes of the inputs vary."""
        columns, masks = {0: ROWS, 1: COLUMNS}, [{0: ROWS, 2: COLUMNS, 3: SPAN}] * len(self.windows)
        return columns, columns, columns, masks


class ChainPass(TreePass):
    """A pass over columns that follow one another: places and masks are part of the program."""

    kind: ClassVar[str] = "chain"

    @property
    def num_moving(self) -> int:
        return 3

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The same for columns behind ``length_B`` slots; of ``slot_S`` only its size counts."""
        N, span = tokens_BN.shape[1], slot_S.shape[0]
        places_BN = length_B[:, None] + torch.arange(N, device=length_B.device)
        masks = [
            chain_mask(places_BN, span, self.dtype, window) for window in self.windows.values()
        ]
        positions_BN = places_BN.clamp(max=self.limit - 1)
        return super().forward(tokens_BN, positions_BN, places_BN, masks, keys, values)

    def inputs(
        self, buffers: KVBuffers, rows: int, columns: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        tokens_BN, places_BN = _example_columns(buffers, rows, columns, span)
        slot_S = torch.arange(span, device=tokens_BN.device)
        return tokens_BN, places_BN[:, 0].clone(), slot_S, *_empty(buffers, rows, slots)

    def sizes(self) -> tuple[Any, ...]:
        return {0: ROWS, 1: COLUMNS}, {0: ROWS}, {0: SPAN}


def trace(each: TreePass, buffers: KVBuffers) -> ExportedProgram:
    """The program of a pass over KV buffers like these."""
    varying = [[{0: ROWS, 2: SLOTS}] * len(side) for side in buffers]
    with torch.no_grad():
        return torch.export.export(
            each,
            each.inputs(buffers, *_SIZES),
            dynamic_shapes=(*each.sizes(), *varying),
            strict=False,
        )


def _example_columns(
    buffers: KVBuffers, rows: int, columns: int, span: int
) -> tuple[Tensor, Tensor]:
    places_BN = torch.arange(span - columns, span, device=buffers[0][0].device).repeat(rows, 1)
    return torch.zeros_like(places_BN), places_BN


def _empty(buffers: KVBuffers, rows: int, slots: int) -> list[list[Tensor]]:
    return [
        [buffer.new_zeros(rows, buffer.shape[1], slots, buffer.shape[3]) for buffer in side]
        for side in buffers
    ]
