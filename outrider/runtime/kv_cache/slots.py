"""Slots of a KV buffer, and how a forward pass writes to them: the same eagerly and compiled.

Legend: B rows, H heads, N query tokens, S slots, C width of a head.
"""

import torch
from torch import Tensor


def slots_behind(length_B: Tensor, first: int, num_queries: int) -> Tensor:
    """The slots of query tokens behind each row's committed ones, the first ``first`` of which
    earlier forward passes have filled, (B, N)."""
    step_N = torch.arange(first, first + num_queries, device=length_B.device)
    return length_B[:, None] + step_N


def write_at(buffer: Tensor, rows_B1: Tensor, slots_BN: Tensor, new_BHNC: Tensor) -> None:
    """Writes keys or values to each row's own slots of a KV buffer (B, H, S, C), in place."""
    buffer[rows_B1, :, slots_BN] = new_BHNC.transpose(1, 2)
