"""Moving tokens to other slots of KV buffers: all buffers by one call of a kernel.

A round of a tree moves the accepted path in every layer. By torch's own operators that takes two
calls per buffer, 64 for a model of sixteen layers, which cost more than the copying.

Legend: B rows, H heads, S slots, C width of a head, D moved tokens.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.core.lengths import Lengths
from outrider.runtime.kernels.build import kernels_are_loaded
from outrider.runtime.kernels.checked_on_gpu import kernel_or_torch

MoveSlots = Callable[[Sequence[Tensor], Lengths, Tensor, int], None]


def move_slots(
    buffers: Sequence[Tensor], lengths: Lengths, index_BD: Tensor, first: int = 0
) -> None:
    """Moves tokens of each row to the slots ``first``, ``first + 1``, … after its committed ones.
    Writes to the buffers, and reads all slots of a row before it writes any.

    Args:
        buffers: (B, H, S, C) each, of any dtype; rows beyond the index stay as they are.
        lengths: committed tokens of each row.
        index_BD: which tokens, counted from the committed ones on.
        first: as above.
    """
    if index_BD.device.type == "cpu" and kernels_are_loaded():
        torch.ops.outrider.move_slots(buffers, lengths.host, index_BD, first)
    elif index_BD.device.type == "cuda":
        move_on(index_BD.device)(buffers, lengths, index_BD, first)
    else:
        move_slots_one_by_one(buffers, lengths, index_BD, first)


def move_slots_one_by_one(
    buffers: Sequence[Tensor], lengths: Lengths, index_BD: Tensor, first: int = 0
) -> None:
    """As :func:`move_slots`, by torch's own operators, buffer by buffer."""
    B, D = index_BD.shape
    rows_B1 = torch.arange(B, device=index_BD.device)[:, None]
    from_BD = lengths.device_B[:, None] + index_BD
    to_BD = lengths.device_B[:, None] + first + torch.arange(D, device=index_BD.device)
    for buffer in buffers:
        buffer[rows_B1, :, to_BD] = buffer[rows_B1, :, from_BD]


@lru_cache(maxsize=8)
def move_on(device: torch.device) -> MoveSlots:
    """What moves tokens within buffers on a GPU."""
    by_torch: MoveSlots = move_slots_one_by_one
    lengths, index_BD = Lengths.of([3, 5], device), torch.tensor([[2, 4], [1, 2]], device=device)

    def moved(move: MoveSlots) -> list[Tensor]:
        buffers = [torch.arange(480, device=device).view(2, 3, 16, 5) + i for i in range(4)]
        move(buffers, lengths, index_BD, 1)
        return buffers

    def agree(found: MoveSlots, wanted: MoveSlots) -> bool:
        return all(map(torch.equal, moved(found), moved(wanted)))

    return kernel_or_torch(_kernel, by_torch, agree, "moves tokens in KV buffers")


def _kernel() -> MoveSlots:
    from outrider.runtime.kernels import gpu_slots

    return gpu_slots.move_slots
