"""The losses: gradients against finite differences, and where they are zero."""

import pytest
import torch

from outrider.train.evaluate import acceptance
from outrider.train.losses import cross_entropy, forward_kl, total_variation


def finite_differences(loss, logits_NV, step=1e-3):
    gradient_NV = torch.zeros_like(logits_NV)
    for i in range(logits_NV.shape[0]):
        for j in range(logits_NV.shape[1]):
            up_NV, down_NV = logits_NV.clone(), logits_NV.clone()
            up_NV[i, j] += step
            down_NV[i, j] -= step
            gradient_NV[i, j] = (loss(up_NV) - loss(down_NV)) / (2 * step)
    return gradient_NV


def logits(seed, scale=1.0):
    return scale * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))


def test_gradients_equal_finite_differences():
    p_NV, labels_N = logits(0), torch.tensor([1, 4, 0])
    losses = (
        lambda q_NV: forward_kl(p_NV, q_NV),
        lambda q_NV: total_variation(p_NV, q_NV),
        lambda q_NV: cross_entropy(q_NV, labels_N),
    )
    for loss in losses:
        q_NV = logits(1).requires_grad_()
        loss(q_NV).backward()
        torch.testing.assert_close(
            q_NV.grad, finite_differences(loss, q_NV.detach()), atol=3e-4, rtol=1e-3
        )


def test_gradient_of_forward_kl_is_q_minus_p():
    p_NV, q_NV = logits(0), logits(1).requires_grad_()
    forward_kl(p_NV, q_NV).backward()
    torch.testing.assert_close(q_NV.grad, (q_NV.softmax(-1) - p_NV.softmax(-1)).detach() / 3)


@pytest.mark.parametrize("divergence", [forward_kl, total_variation])
def test_divergence_is_zero_iff_distributions_are_equal(divergence):
    p_NV = logits(0)
    assert divergence(p_NV, p_NV + 7.0).abs() < 1e-6  # a shift of logits is the same distribution
    for seed in range(1, 20):
        assert divergence(p_NV, p_NV + logits(seed, 0.1)) > 1e-5


def test_total_variation_is_one_minus_alpha():
    p_NV, q_NV = logits(0), logits(1)
    alpha = acceptance(p_NV, q_NV, temperature=1.0).mean()
    torch.testing.assert_close(total_variation(p_NV, q_NV), 1 - alpha)


def test_forward_kl_has_no_gradient_for_the_target():
    p_NV, q_NV = logits(0).requires_grad_(), logits(1).requires_grad_()
    forward_kl(p_NV, q_NV).backward()
    assert p_NV.grad is None


def test_losses_are_computed_in_float32():
    p_NV, q_NV = logits(0).bfloat16(), logits(1).bfloat16()
    assert forward_kl(p_NV, q_NV).dtype == torch.float32
    assert cross_entropy(q_NV, torch.tensor([0, 1, 2])).dtype == torch.float32
