"""A model's forward pass as a program of symbolic sizes: rows, query tokens per row, slots
allocated, slots read.

One program serves every draft length, batch, context and KV buffer. ``torch.export`` traces the
model's own code, with our KV buffers and masks in place of those of ``transformers``.

Legend: B rows, N query tokens, K of them whose logits are asked for, M nodes after the committed
tokens, S slots read or tokens of a source, V vocabulary, H hidden width, W that of the
encoder.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from outrider.core.health import health_of
from outrider.runtime.attention_metadata import AttentionMetadata, AttentionSpec, Nodes
from outrider.runtime.executors.eager import decoder_logits
from outrider.runtime.executors.export import export
from outrider.runtime.executors.traced_cache import (
    ROWS,
    KVBuffers,
    TracedKVCache,
    TracedSeq2SeqCache,
    empty_buffers,
    halves,
    varying,
)
from outrider.runtime.hf.hidden_states import joined, recording_hidden_states

_SIZES = 3, 5, 23, 40
"""Rows, query tokens, span and slots to trace with: all differ, lest two be taken for one."""


QUERIES, SPAN, ASKED, NODES = Dim("queries"), Dim("span"), Dim("asked"), Dim("nodes")
_EARLIER = 2
"""Nodes that the query tokens of examples follow."""


class TreeForward(nn.Module):
    """A forward pass over query tokens whose slots, positions and masks are given, as those of a
    tree are where a model has two sets of rotary factors.

    Args:
        module: the model; where hidden states are asked for, a view that records them
            (``hf/hidden_states.py``).
        spec: what positions and masks depend on.
        hidden_layers: the layers whose hidden states are returned.
    """

    kind: ClassVar[str] = "tree"
    """What messages call its program."""

    def __init__(
        self, module: nn.Module, spec: AttentionSpec, hidden_layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.module = module
        self.spec = spec
        self.hidden_layers = hidden_layers

    @property
    def dtype(self) -> torch.dtype:
        """Of the masks, and of the logits."""
        return self.spec.dtype

    def extra_repr(self) -> str:
        """All that the program depends on besides the model."""
        return f"{self.spec}, hidden_layers={self.hidden_layers}"

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        attention: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """Logits (B, N, V), a number per row (B,) that is finite iff they are healthy, and the
        hidden states (B, N, H) where some are asked for. Of ``attention`` the first are the masks,
        one per kind of layer; the last are the positions of slots, where the model is told them."""
        num_masks = len(self.spec.windows)
        by_kind = dict(zip(self.spec.windows, attention[:num_masks], strict=True))
        metadata = AttentionMetadata(slots_BN, positions_BN, by_kind, *attention[num_masks:])
        return self.run(tokens_BN, metadata, attention[0].shape[-1], keys, values)

    def run(
        self,
        tokens_BN: Tensor,
        metadata: AttentionMetadata,
        span: int,
        keys: list[Tensor],
        values: list[Tensor],
        resume_BNH: Tensor | None = None,
        asked_K: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The model's forward pass over these KV buffers; results as :meth:`forward`, but the
        logits (B, K, V) of the query tokens at ``asked_K`` alone where that is given."""
        kind = TracedSeq2SeqCache if self.spec.reads_sources else TracedKVCache
        cache = kind(keys, values, metadata.slots_BN, span)
        cache.resume_BNH = resume_BNH
        with recording_hidden_states() as recording:
            more = {} if asked_K is None else {"logits_to_keep": asked_K}
            logits_BNV = decoder_logits(self.module, tokens_BN, metadata, cache, **more)
        hidden_BNH = joined(recording, self.hidden_layers)
        found = logits_BNV, health_of(logits_BNV)
        return found if hidden_BNH is None else (*found, hidden_BNH)

    def fill(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        """Writes the keys and values of tokens to all slots of KV buffers."""
        rows, slots = tokens_BS.shape
        if self.spec.reads_sources:
            self.write_sources(tokens_BS.flip(1), keys, values)
        metadata = self.spec.metadata(tokens_BS.new_zeros(rows), slots, slots)
        self.run(tokens_BS, metadata, slots, keys, values)

    def write_sources(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Encodes the sources, and writes their keys and values to the KV buffers of
        cross-attention; returns the encoder's output, (B, S, W). Only the first tokens count, as
        many as the mask of the sources is wide.

        The layers themselves say how keys and values are computed, so the decoder runs over one
        token. What it computes besides is dropped, and left out of a program: its own keys and
        values go to tensors that nobody reads.
        """
        module: Any = self.module
        seen_BS = (values[-1][:, 0, 0] == 0).long()
        tokens_BS = tokens_BS[:, : seen_BS.shape[1]]
        states_BSW: Tensor = module.encoded(tokens_BS, seen_BS)
        rows, half = tokens_BS.shape[0], len(keys) // 2
        metadata = self.spec.metadata(tokens_BS.new_zeros(rows), 1, 1)
        unread = [
            [each.new_zeros(rows, each.shape[1], 1, each.shape[3]) for each in side[:half]]
            for side in (keys, values)
        ]
        cache = TracedSeq2SeqCache(
            [*unread[0], *keys[half:]],
            [*unread[1], *values[half:]],
            metadata.slots_BN,
            1,
            states_BSW,
        )
        with recording_hidden_states():
            decoder_logits(module, tokens_BS[:, :1], metadata, cache)
        return states_BSW

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of :meth:`forward`, from the inputs of a program in their order."""
        moving, buffers = inputs[: self.num_moving], inputs[self.num_moving :]
        return *self.grouped(moving), *map(list, halves(buffers))

    def grouped(self, moving: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments before the KV buffers."""
        return *moving[:3], list(moving[3:])

    def results(
        self, outputs: Sequence[Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Sequence[Tensor]:
        """What a program is checked by: its outputs, or what it wrote to KV buffers if they do not
        depend on that."""
        return outputs

    @property
    def num_moving(self) -> int:
        """How many tensors the inputs have before the KV buffers."""
        return 3 + len(self.spec.windows) + self.spec.tells_slots

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        """Inputs of these sizes, with empty KV buffers like the ones given."""
        tokens_BN, slots_BN = _example_queries(buffers, rows, queries, span)
        masks = [
            tokens_BN.new_zeros(rows, 1, queries, span, dtype=self.dtype) for _ in self.spec.windows
        ]
        slot_BS = torch.arange(span, device=tokens_BN.device).repeat(rows, 1)
        attention = [*masks, slot_BS] if self.spec.tells_slots else masks
        kv = self._empty(buffers, rows, slots)
        return tokens_BN, slots_BN.clone(), slots_BN, attention, *kv

    def sizes(self) -> tuple[Any, ...]:
        """Which sizes of the inputs vary."""
        queries = {0: ROWS, 1: QUERIES}
        masks = [{0: ROWS, 2: QUERIES, 3: SPAN}] * len(self.spec.windows)
        slots = [{0: ROWS, 1: SPAN}] * self.spec.tells_slots
        return queries, queries, queries, [*masks, *slots]

    def _empty(self, buffers: KVBuffers, rows: int, slots: int) -> list[list[Tensor]]:
        return empty_buffers(buffers, rows, slots, reads_sources=self.spec.reads_sources)


class ChainForward(TreeForward):
    """A forward pass over query tokens that follow one another: slots, positions and masks are
    computed by the program."""

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
    ) -> tuple[Tensor, ...]:
        """The same for query tokens after ``length_B`` slots; of ``slot_S`` only the size
        counts."""
        span = slot_S.shape[0]
        metadata = self.spec.metadata(length_B, tokens_BN.shape[1], span)
        return self.run(tokens_BN, metadata, span, keys, values)

    def grouped(self, moving: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple(moving)

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        tokens_BN, slots_BN = _example_queries(buffers, rows, queries, span)
        slot_S = torch.arange(span, device=tokens_BN.device)
        return tokens_BN, slots_BN[:, 0].clone(), slot_S, *self._empty(buffers, rows, slots)

    def sizes(self) -> tuple[Any, ...]:
        return {0: ROWS, 1: QUERIES}, {0: ROWS}, {0: SPAN}


class AskedForward(ChainForward):
    """A forward pass that computes the logits of some of its query tokens: of all of them in a
    round, of one in a prefill."""

    @property
    def num_moving(self) -> int:
        return 4

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        asked_K: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``ChainForward``, with the logits (B, K, V) of the query tokens at these indices."""
        span = slot_S.shape[0]
        metadata = self.spec.metadata(length_B, tokens_BN.shape[1], span)
        return self.run(tokens_BN, metadata, span, keys, values, asked_K=asked_K)

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        *moving, keys, values = super().inputs(buffers, rows, queries, span, slots)
        asked_K = torch.arange(min(1, queries - 1), queries, device=moving[0].device)
        return *moving, asked_K, keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ASKED}


class NodesForward(ChainForward):
    """A forward pass over nodes of a tree: slots, positions and masks are computed by the program,
    which spares a round some twenty small operations before it."""

    kind: ClassVar[str] = "tree"

    @property
    def num_moving(self) -> int:
        return 5

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        ancestors_BNM: Tensor,
        depth_BM: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``ChainForward``, for the last N of M nodes, described as in ``Nodes``."""
        span, nodes = slot_S.shape[0], Nodes(ancestors_BNM, depth_BM)
        metadata = self.spec.metadata(length_B, tokens_BN.shape[1], span, nodes)
        return self.run(tokens_BN, metadata, span, keys, values)

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        """Two chains side by side, of each of which one node is not among the query tokens."""
        tokens_BN, _, *rest, keys, values = super().inputs(buffers, rows, queries, span, slots)
        num = queries + _EARLIER
        node_M = torch.arange(num, device=tokens_BN.device)
        node_N1 = node_M[_EARLIER:, None]
        is_above_NM = (node_M <= node_N1) & (node_M % 2 == node_N1 % 2)
        length_B = torch.full((rows,), span - num, device=tokens_BN.device)
        ancestors_BNM = is_above_NM.repeat(rows, 1, 1)
        depth_BM = (node_M // 2).repeat(rows, 1)
        return tokens_BN, length_B, *rest, ancestors_BNM, depth_BM, keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS, 1: QUERIES, 2: NODES}, {0: ROWS, 1: NODES}


class HeadlessForward(ChainForward):
    """A forward pass that computes the hidden states of layers, and no logits."""

    kind: ClassVar[str] = "headless chain"

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The hidden states (B, N, H), and a number per row, (B,), that is always finite."""
        _, health_B, hidden_BNH = super().forward(tokens_BN, length_B, slot_S, keys, values)
        return hidden_BNH, health_B


class ResumedForward(ChainForward):
    """A forward pass of the layers after an exit layer, which goes on from the hidden states
    there."""

    kind: ClassVar[str] = "resumed chain"

    @property
    def num_moving(self) -> int:
        return 4

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        resume_BNH: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``ChainForward``; of ``tokens_BN`` only the size counts."""
        span = slot_S.shape[0]
        metadata = self.spec.metadata(length_B, tokens_BN.shape[1], span)
        return self.run(tokens_BN, metadata, span, keys, values, resume_BNH)

    def fill(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        rows, slots = tokens_BS.shape
        metadata = self.spec.metadata(tokens_BS.new_zeros(rows), slots, slots)
        self.run(tokens_BS, metadata, slots, keys, values, self._hidden(tokens_BS))

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        *moving, keys, values = super().inputs(buffers, rows, queries, span, slots)
        return *moving, self._hidden(moving[0]), keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS, 1: QUERIES}

    def _hidden(self, tokens_BN: Tensor) -> Tensor:
        """Various hidden states for as many tokens, (B, N, H)."""
        config: Any = self.module.config
        shape = *tokens_BN.shape, config.get_text_config().hidden_size
        wave = (0.7 * torch.arange(math.prod(shape), device=tokens_BN.device)).sin()
        return wave.view(shape).to(self.dtype)


def trace(each: TreeForward, buffers: KVBuffers) -> ExportedProgram:
    """The program of a forward pass over KV buffers like these."""
    of_buffers = varying(buffers, reads_sources=each.spec.reads_sources)
    return export(each, each.inputs(buffers, *_SIZES), (*each.sizes(), *of_buffers))


def _example_queries(
    buffers: KVBuffers, rows: int, queries: int, span: int
) -> tuple[Tensor, Tensor]:
    """Tokens, and the last slots of the span, each (B, N)."""
    slots_BN = torch.arange(span - queries, span, device=buffers[0][0].device).repeat(rows, 1)
    return torch.zeros_like(slots_BN), slots_BN
