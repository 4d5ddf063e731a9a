"""Positions of their own for every row, in decoders that take none.

The decoders of encoder-decoders have no ``position_ids``. T5 works out the relative positions of a
pass from one offset for the whole batch (``compute_bias``); BART and its relatives number the
columns of a pass from one cache length (``embed_positions``). In a ragged batch rows differ, and in
a tree siblings share a place. So passes run on a view of the module (``views.py``), in which that
one method reads positions given per row. The loaded module stays as ``transformers`` made it.

Which positions belong to a pass is known to the thread that runs it, so threads may share a view.

Legend: B rows, N nodes of a pass, S slots, H heads, C width of an embedding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from outrider.runtime.hf.views import StandIn, copied, with_parts

RELATIVE = frozenset({"t5", "mt5"})
ABSOLUTE = frozenset(
    {"bart", "mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small"}
)


@dataclass(frozen=True)
class Places:
    """Where the nodes of a pass stand, and what each slot of the cache holds.

    Attributes:
        node_BN: position of each node.
        slot_BS: position of the token in each slot, the nodes' own included.
    """

    node_BN: Tensor
    slot_BS: Tensor


_PLACES: ContextVar[Places] = ContextVar("places of the pass that this thread runs")

M = TypeVar("M", bound=nn.Module)


def placeable(module: M, decoder: nn.Module, *, relative: bool) -> M:
    """A view of a module whose decoder's passes run at places: see :func:`placed`.

    Args:
        module: the encoder-decoder.
        decoder: the part of it that writes.
        relative: whether it has relative positions, as T5 has; else a table, as BART has.
    """
    if relative:
        return with_parts(module, {each: _told(each) for each in _biased(decoder)})
    table: Any = decoder.embed_positions
    return with_parts(module, {table: StandIn(table, _embedding(table))})


@contextmanager
def placed(places: Places) -> Iterator[None]:
    """Runs the body's passes of views at these places."""
    before = _PLACES.set(places)
    try:
        yield
    finally:
        _PLACES.reset(before)


def _biased(decoder: Any) -> list[Any]:
    """The self-attentions that have a relative bias: the first, which the others share, or all."""
    attentions = [block.layer[0].SelfAttention for block in decoder.block]
    return [attention for attention in attentions if attention.has_relative_attention_bias]


def _told(attention: Any) -> Any:
    """T5's attention whose ``compute_bias`` is (B, H, N, S), where the class has (1, H, N, S)."""

    def compute_bias(*args: object, **kwargs: object) -> Tensor:
        places = _PLACES.get()
        bucket_BNS = attention._relative_position_bucket(
            places.slot_BS[:, None] - places.node_BN[..., None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias_BNSH: Tensor = attention.relative_attention_bias(bucket_BNS)
        return bias_BNSH.permute(0, 3, 1, 2)

    twin = copied(attention)
    twin.compute_bias = compute_bias
    return twin


def _embedding(table: nn.Module) -> Callable[..., Tensor]:
    """BART's ``embed_positions``, (B, N, C) where the class has (1, N, C). Some add an offset to
    the positions, some a dimension in front; the class's own method still does the first."""

    def embed(like: object, *args: object, **kwargs: object) -> Tensor:
        node_BN = _PLACES.get().node_BN
        vectors: Tensor = table(like, position_ids=node_BN)
        return vectors.view(*node_BN.shape, -1)

    return embed
