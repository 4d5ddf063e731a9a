"""Triton's kernel moves tokens within KV buffers as torch's own operators do."""

import pytest
import torch
from gpu_here import DEVICE, NEEDS_TRITON
from test_move_slots import LENGTHS, PATHS, buffers_of

from outrider.core import Lengths
from outrider.runtime.kernels.move_slots import move_on, move_slots_one_by_one

HERE = torch.device(DEVICE)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def layers_of(dtype: torch.dtype, rows: int) -> list[torch.Tensor]:
    """Three buffers of each size, one of which is part of a larger one."""
    layers = zip(*(buffers_of(dtype, rows) for _ in range(3)), strict=True)
    return [each.to(HERE) for same in layers for each in same]


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [3, 5])
def test_moves_as_torch_does(dtype: torch.dtype, path: str, rows: int) -> None:
    from outrider.runtime.kernels.gpu_slots import move_slots

    index_BD = torch.tensor(PATHS[path], dtype=torch.int64, device=HERE)
    lengths = Lengths.of(LENGTHS.host, HERE)
    for first in (0, 1, 2):
        found, wanted = layers_of(dtype, rows), layers_of(dtype, rows)
        move_slots(found, lengths, index_BD, first)
        move_slots_one_by_one(wanted, lengths, index_BD, first)
        assert all(map(torch.equal, found, wanted))


@NEEDS_TRITON
def test_the_kernel_is_used() -> None:
    from outrider.runtime.kernels import gpu_slots

    assert move_on(HERE) is gpu_slots.move_slots
