"""Positions of their own for every row, in decoders that take none.

The decoders of encoder-decoders have no ``position_ids``. T5 works out the relative positions of a
pass from one offset for the whole batch (``compute_bias``); BART and its relatives number the
columns of a pass from one cache length (``embed_positions``). In a ragged batch rows differ, and in
a tree siblings share a place. So for the length of a pass, and no longer, that one method is
replaced on the loaded instance by one that reads positions given per row. The model's class, and
the instance between passes, are as ``transformers`` made them.

Legend: B rows, N nodes of a pass, S slots, H heads, C width of an embedding.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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


@contextmanager
def placed(decoder: nn.Module, places: Places, *, relative: bool) -> Iterator[None]:
    """Runs the body's passes of a decoder at these places. Mutates the decoder meanwhile."""
    with ExitStack() as stack:
        if relative:
            for attention in _biased(decoder):
                stack.enter_context(
                    _replaced(attention, "compute_bias", _relative_bias(attention, places))
                )
        else:
            table: Any = decoder.embed_positions
            stack.enter_context(_replaced(table, "forward", _embedded(table.forward, places)))
        yield


def _biased(decoder: Any) -> list[Any]:
    """The self-attentions that have a relative bias: the first, which the others share, or all."""
    attentions = [block.layer[0].SelfAttention for block in decoder.block]
    return [attention for attention in attentions if attention.has_relative_attention_bias]


def _relative_bias(attention: Any, places: Places) -> Callable[..., Tensor]:
    """T5's ``compute_bias``, (B, H, N, S) where the class has (1, H, N, S)."""

    def compute_bias(*args: object, **kwargs: object) -> Tensor:
        bucket_BNS = attention._relative_position_bucket(
            places.slot_BS[:, None] - places.node_BN[..., None],
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        bias_BNSH: Tensor = attention.relative_attention_bias(bucket_BNS)
        return bias_BNSH.permute(0, 3, 1, 2)

    return compute_bias


def _embedded(forward: Callable[..., Tensor], places: Places) -> Callable[..., Tensor]:
    """BART's ``embed_positions``, (B, N, C) where the class has (1, N, C). Some add an offset to
    the positions, some a dimension in front; the class's own method still does the first."""

    def embed(like: object, *args: object, **kwargs: object) -> Tensor:
        return forward(like, position_ids=places.node_BN).view(*places.node_BN.shape, -1)

    return embed


@contextmanager
def _replaced(owner: nn.Module, name: str, function: Callable[..., Tensor]) -> Iterator[None]:
    """Shadows a method on one instance; an instance's own (a hook's, say) is put back."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = before
