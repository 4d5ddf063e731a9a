"""Moving tokens to other slots of KV buffers on a GPU, in Triton: all layers by one kernel.

The kernel gets the addresses of the buffers in a table, which is copied to the GPU once for a set
of buffers. Buffers of other sizes are another set.

Legend: B rows, H heads, S slots, C width of a head, D moved tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.lengths import Lengths, to_device
from outrider.runtime.kernels.gpu_kernels import on_device_of

_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""What numbers of so many bytes are copied as."""


def move_slots(
    buffers: Sequence[Tensor], lengths: Lengths, index_BD: Tensor, first: int = 0
) -> None:
    """As ``kernels/move_slots.py``, for buffers on a GPU."""
    B, D = index_BD.shape
    if not B * D:
        return
    index_BD, sizes = index_BD.contiguous(), {"NODES": triton.next_power_of_2(D)}
    for (shape, strides, num_bytes), group in groupby(buffers, _layout):
        same = list(group)
        H, C = shape
        table = _table(tuple(each.data_ptr() for each in same), index_BD.device)
        sizes |= {"WIDTH": triton.next_power_of_2(C), "INTEGER": _INTEGERS[num_bytes]}
        with on_device_of(index_BD):
            _move[(len(same), B, H)](
                table, lengths.device_B, index_BD, D, first, C, *strides, **sizes
            )


def _layout(buffer: Tensor) -> tuple[tuple[int, int], tuple[int, ...], int]:
    return (buffer.shape[1], buffer.shape[3]), buffer.stride(), buffer.element_size()


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return to_device(torch.tensor(addresses, dtype=torch.int64), device)


@triton.jit(do_not_specialize=["D", "first"])
def _move(
    table,
    lengths,
    index,
    D,
    first,
    C,
    row_stride,
    head_stride,
    slot_stride,
    width_stride,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Moves the tokens of a head of a row. All are read before one is written, since a slot may be
    read and written."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    buffer = tl.load(table + tl.program_id(0)).to(tl.pointer_type(INTEGER))
    buffer += row * row_stride + head * head_stride
    length = tl.load(lengths + row)
    node, column = tl.arange(0, NODES), tl.arange(0, WIDTH)[None, :]
    here = (node < D)[:, None] & (column < C)
    source = length + tl.load(index + row * D + node, node < D, 0)
    moved = tl.load(buffer + source[:, None] * slot_stride + column * width_stride, here, 0)
    tl.debug_barrier()
    target = length + first + node
    tl.store(buffer + target[:, None] * slot_stride + column * width_stride, moved, here)
