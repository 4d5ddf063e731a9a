"""Reductions equal torch's own."""

import pytest
import torch

from outrider.core import any_of, argmax


@pytest.mark.parametrize("size", [50, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_best_token_is_the_first_argmax(dtype: torch.dtype, size: int) -> None:
    """Ties within a block and across blocks, infinities, NaN, and views."""
    x_BMV = torch.randn(3, 4, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    x_BMV[0, 0, 7:9] = 9.0
    x_BMV[0, 1] = -torch.inf
    x_BMV[1, 0, 30] = torch.inf
    x_BMV[1, 1, [size // 2, size - 1]] = 9.0
    x_BMV[1, 2, size - 1] = 9.0
    x_BMV[2, 3, [20, size - 2]] = torch.nan
    assert torch.equal(argmax(x_BMV), x_BMV.argmax(-1))
    assert argmax(x_BMV)[0, 0] == 7
    assert argmax(x_BMV)[1, 1] == size // 2
    assert torch.equal(argmax(x_BMV[:, 1::2, 3:]), x_BMV[:, 1::2, 3:].argmax(-1))


def test_any_of_truth_values() -> None:
    x_BN = torch.tensor([[True, False, True], [False, False, False], [False, False, True]])
    assert any_of(x_BN).tolist() == [True, False, True]
    assert any_of(x_BN[:, :0]).tolist() == [False, False, False]
