"""The kernel that moves tokens within KV buffers does what torch's own operators do.

Legend: B rows, H heads, S slots, C width of a head, D moved tokens.
"""

import pytest
import torch
from torch import Tensor

from outrider.core import Lengths
from outrider.core.context import Context
from outrider.runtime import KVCache
from outrider.runtime.kernels import kernels_are_loaded
from outrider.runtime.kernels.build import find_compiler, load_kernels
from outrider.runtime.kernels.move_slots import move_slots, move_slots_one_by_one
from outrider.runtime.kv_cache.storage import KVCachePlan, KvDtype
from outrider.testing import SoftmaxDistribution

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

S = 24
LENGTHS = Lengths([3, 9, 0])
PATHS = {
    "a path that stays": [[1, 2, 3]] * 3,
    "paths further down": [[2, 5, 9], [1, 4, 6], [3, 3, 12]],
    "sources that are also targets": [[3, 1, 2], [2, 3, 1], [2, 2, 2]],
    "one token": [[4], [1], [2]],
    "no token": [[], [], []],
}


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    load_kernels()


def buffers_of(dtype: torch.dtype, rows: int) -> list[Tensor]:
    """Buffers of different heads and widths, one of them a part of a larger one."""
    shapes = (rows, 2, S, 5), (rows, 1, S, 1), (rows, 3, S + 7, 16)
    generator = torch.Generator().manual_seed(rows)
    made = [torch.randint(-99, 99, shape, generator=generator).to(dtype) for shape in shapes]
    return [*made[:2], made[2][:, 1:, 3:, 4:12]]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [3, 5])
def test_moves_as_torch_does(dtype: torch.dtype, path: str, rows: int) -> None:
    """Buffers may have more rows than there are paths."""
    assert kernels_are_loaded()
    index_BD = torch.tensor(PATHS[path], dtype=torch.int64)
    for first in (0, 1, 2):
        found, wanted = buffers_of(dtype, rows), buffers_of(dtype, rows)
        move_slots(found, LENGTHS, index_BD, first)
        move_slots_one_by_one(wanted, LENGTHS, index_BD, first)
        assert all(map(torch.equal, found, wanted))


def test_a_slot_beyond_the_buffers_is_an_error() -> None:
    for index in (S, -4):
        with pytest.raises(RuntimeError, match="KV buffer"):
            move_slots(buffers_of(torch.float32, 3), Lengths([3] * 3), torch.tensor([[index]] * 3))


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "int8"])
def test_an_accepted_path_is_kept_whatever_the_storage(kv_dtype: KvDtype) -> None:
    """All planes move: of int8, numbers and scales."""
    context = Context.start([[1] * 4, [1] * 6], SoftmaxDistribution(), [0, 0], [0, 1])
    cache = KVCache(context, 2, 10**6, KVCachePlan(kv_dtype))
    x_BHNC = torch.randn(2, 2, 8, 3, generator=torch.Generator().manual_seed(0))
    cache.begin(8)
    read = [cache.update(x_BHNC + layer, x_BHNC - layer, layer) for layer in range(2)]
    before = [[each.clone() for each in sides] for sides in read]
    cache.append(1)
    cache.select(torch.tensor([[2, 5, 6], [1, 4, 6]]), Lengths([3, 2]))
    assert cache.lengths == [5, 4]
    cache.begin(1)
    kept = ([0, 1, 3, 6, 7], [0, 1, 2, 5])
    for layer, sides in enumerate(before):
        new_BHNC = torch.zeros(2, 2, 1, 3)
        for side, now in zip(sides, cache.update(new_BHNC, new_BHNC, layer), strict=True):
            for row, slots in enumerate(kept):
                assert torch.equal(now[row, :, : len(slots)], side[row, :, slots])
