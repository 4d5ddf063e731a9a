"""The round's one device-to-host synchronisation: all its numbers are copied together.

Legend: B rows, C columns of a block.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Line = list[list[float]]
"""A row's numbers, block by block."""


def copy_to_host(blocks: Sequence[Tensor]) -> list[Line]:
    """The numbers of each row.

    On a CPU each block is copied by itself. Elsewhere the blocks become one table first, since
    every copy waits for the device.

    Args:
        blocks: columns (B,), or several side by side (B, C); of any dtypes.
    """
    if blocks[0].device.type == "cpu":
        lists = [block.tolist() for block in blocks]
        columns = [block.dim() == 1 for block in blocks]
        return [
            [[part] if one else part for part, one in zip(line, columns, strict=True)]
            for line in zip(*lists, strict=True)
        ]
    blocks = [block if block.dim() == 2 else block[:, None] for block in blocks]
    dtype = torch.float32 if blocks[0].device.type == "mps" else torch.float64
    table = torch.cat([block.to(dtype) for block in blocks], 1).tolist()
    ends = list(accumulate((block.shape[1] for block in blocks), initial=0))
    return [[line[a:b] for a, b in pairwise(ends)] for line in table]
