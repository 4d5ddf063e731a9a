"""Positions per row, for decoders that take no ``position_ids``.

The decoders of encoder-decoders take none. T5 derives the relative positions of a forward pass from
one offset for the whole batch (``compute_bias``); BART and its relatives number the query tokens
from one cache length (``embed_positions``). But in a ragged batch rows differ, and in a tree
siblings share a position. So forward passes run a view of the module (``views.py``), in which that
one method reads positions given per row. The loaded module is not changed.

A context variable holds the positions of a forward pass, so threads may share a view.

Legend: B rows, N query tokens, S slots, H heads, C width of an embedding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from outrider.runtime.hf.views import copied, with_parts

RELATIVE = frozenset({"t5", "mt5"})
ABSOLUTE = frozenset(
    {"bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small"}
)


@dataclass(frozen=True)
class Positions:
    """The positions of a forward pass.

    Attributes:
        query_BN: position of each query token.
        slot_BS: position of the token in each slot, those of the query tokens included; None where
            the decoder has no relative positions.
    """

    query_BN: Tensor
    slot_BS: Tensor | None = None


_POSITIONS: ContextVar[Positions] = ContextVar("positions of this thread's forward pass")

M = TypeVar("M", bound=nn.Module)


def with_positions(module: M, decoder: nn.Module, *, relative: bool) -> M:
    """A view of an encoder-decoder whose decoder reads positions per row: see :func:`at_positions`.

    Args:
        module: the encoder-decoder.
        decoder: its decoder.
        relative: whether it has relative positions, as T5 has; else a table, as BART has.
    """
    if relative:
        return with_parts(module, {each: _told(each) for each in _biased(decoder)})
    table: Any = decoder.embed_positions
    return with_parts(module, {table: _PositionTable(table)})


@contextmanager
def at_positions(positions: Positions) -> Iterator[None]:
    """Runs the forward passes of the body at these positions."""
    before = _POSITIONS.set(positions)
    try:
        yield
    finally:
        _POSITIONS.reset(before)


def _biased(decoder: Any) -> list[Any]:
    """The self-attentions with a relative bias: the first, which the others share, or all."""
    attentions = [block.layer[0].SelfAttention for block in decoder.block]
    return [attention for attention in attentions if attention.has_relative_attention_bias]


def _told(attention: Any) -> Any:
    """T5's attention with a ``compute_bias`` per row, (B, H, N, S), where the class has
    (1, H, N, S)."""

    def compute_bias(*args: object, **kwargs: object) -> Tensor:
        positions = _POSITIONS.get()
        assert positions.slot_BS is not None
        bucket_BNS = attention._relative_position_bucket(
            positions.slot_BS[:, None] - positions.query_BN[..., None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias_BNSH: Tensor = attention.relative_attention_bias(bucket_BNS)
        return bias_BNSH.permute(0, 3, 1, 2)

    twin = copied(attention)
    twin.compute_bias = compute_bias
    return twin


class _PositionTable(nn.Module):
    """BART's ``embed_positions`` per row, (B, N, C), where the class has (1, N, C). Some classes
    add an offset to the positions, as they still do here; some add a leading dimension.

    Args:
        table: the class's own. A part of this module, so that its weights are among those of the
            view, where compiled programs find them.
    """

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.training = table.training

    def forward(self, like: object, *args: object, **kwargs: object) -> Tensor:
        query_BN = _POSITIONS.get().query_BN
        vectors: Tensor = self.table(like, position_ids=query_BN)
        return vectors.view(*query_BN.shape, -1)
