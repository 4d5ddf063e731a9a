"""The fused linear loss: value and gradients of the loss over all logits at once.

Legend: N positions, J hidden states of each, H width, D vocabulary.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from outrider.train.fused_linear_loss import fused_linear_loss
from outrider.train.losses import DIVERGENCES, Divergence

N, J, H, D = 7, 2, 5, 11
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the output layer's weight, the target's logits and the positions' weights."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden_NJH, weight_DH = normal(N, J, H), normal(D, H)
    return hidden_NJH.requires_grad_(), weight_DH.requires_grad_(), normal(N, D), normal(N, J).abs()


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of)


@every_divergence
@pytest.mark.parametrize("chunk", [1, 3 * J * D, 2**20], ids=["one", "three", "all"])
def test_value_and_gradients_are_those_over_all_logits(divergence: Divergence, chunk: int) -> None:
    hidden_NJH, weight_DH, p_ND, weight_NJ = tensors()

    def loss_of(q_CJD: Tensor, rows: slice) -> Tensor:
        return (weight_NJ[rows] * divergence(p_ND[rows, None], q_CJD)).sum()

    whole = 3 * loss_of(linear(hidden_NJH, weight_DH), slice(0, N))
    fused = 3 * fused_linear_loss(hidden_NJH, weight_DH, loss_of, chunk)
    torch.testing.assert_close(fused, whole)
    wanted = gradients(whole, hidden_NJH, weight_DH)
    for found, expected in zip(gradients(fused, hidden_NJH, weight_DH), wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_chunks_are_as_large_as_asked_for() -> None:
    hidden_NJH, weight_DH, *_ = tensors()
    seen = []

    def loss_of(q_CJD: Tensor, rows: slice) -> Tensor:
        seen.append((rows.start, rows.stop, tuple(q_CJD.shape)))
        return q_CJD.sum()

    fused_linear_loss(hidden_NJH, weight_DH, loss_of, 3 * J * D)
    assert seen == [(0, 3, (3, J, D)), (3, 6, (3, J, D)), (6, 7, (1, J, D))]


def test_no_positions_have_no_loss_and_no_gradient() -> None:
    hidden_NJH, weight_DH, *_ = tensors()
    loss = fused_linear_loss(hidden_NJH[:0], weight_DH, lambda q_CJD, rows: q_CJD.sum())
    assert loss == 0
    (gradient_DH,) = gradients(loss, weight_DH)
    assert not gradient_DH.any()


def test_under_autocast_products_are_rounded_and_gradients_keep_the_weights_dtype() -> None:
    hidden_NJH, weight_DH, p_ND, _ = tensors(torch.float32)
    dtypes = []

    def loss_of(q_CJD: Tensor, rows: slice) -> Tensor:
        dtypes.append(q_CJD.dtype)
        return DIVERGENCES["forward-kl"](p_ND[rows, None], q_CJD).sum()

    exact = gradients(fused_linear_loss(hidden_NJH, weight_DH, loss_of), hidden_NJH, weight_DH)
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_linear_loss(hidden_NJH, weight_DH, loss_of)
    rounded = gradients(loss, hidden_NJH, weight_DH)
    assert dtypes == [torch.float32, torch.bfloat16]
    for found, expected in zip(rounded, exact, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        assert not torch.equal(found, expected)
