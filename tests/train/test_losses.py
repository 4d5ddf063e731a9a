"""The losses: closed forms, finite differences in float64, and where they are zero."""

import math
from functools import partial

import pytest
import torch

from outrider.train.evaluate import acceptance
from outrider.train.losses import (
    DIVERGENCES,
    SMALLEST_ACCEPTANCE,
    cross_entropy,
    forward_kl,
    jensen_shannon,
    lk_hybrid,
    negative_log_acceptance,
    reverse_kl,
    total_variation,
    weighted_mean,
)

ALL = {**DIVERGENCES, "js of 0.2": partial(jensen_shannon, beta=0.2)}
every_divergence = pytest.mark.parametrize("divergence", ALL.values(), ids=ALL)

P = [0.5, 0.25, 0.25]
Q = [0.25, 0.25, 0.5]
ALPHA = 0.75
KL = 0.25 * math.log(2)  # both ways


def logits(seed, scale=1.0, dtype=torch.float32):
    noise_NV = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (scale * noise_NV).to(dtype)


def of(divergence, p, q, **options):
    """The divergence of two distributions given as lists of probabilities."""
    p_NV, q_NV = (torch.tensor([each], dtype=torch.float64).log() for each in (p, q))
    return divergence(p_NV, q_NV, **options).item()


def finite_differences(loss, logits_NV, step=1e-6):
    gradient_NV = torch.zeros_like(logits_NV)
    for i in range(logits_NV.shape[0]):
        for j in range(logits_NV.shape[1]):
            up_NV, down_NV = logits_NV.clone(), logits_NV.clone()
            up_NV[i, j] += step
            down_NV[i, j] -= step
            gradient_NV[i, j] = (loss(up_NV) - loss(down_NV)) / (2 * step)
    return gradient_NV


def test_closed_forms():
    share = math.exp(-3 * ALPHA)
    m = [0.375, 0.25, 0.375]
    js = sum(a * math.log(a / c) + b * math.log(b / c) for a, b, c in zip(P, Q, m, strict=True)) / 2
    expected = {
        "forward-kl": KL,
        "reverse-kl": KL,
        "js": js,
        "tv": 1 - ALPHA,
        "lk": share * KL + (1 - share) * (1 - ALPHA),
        "nla": -math.log(ALPHA),
    }
    assert expected.keys() == DIVERGENCES.keys()
    for name, value in expected.items():
        assert of(DIVERGENCES[name], P, Q) == pytest.approx(value, rel=1e-12), name


def test_the_two_kl_divergences_are_told_apart():
    p, q = [0.9, 0.1], [0.5, 0.5]
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5)
    assert of(forward_kl, p, q) == pytest.approx(forward)
    assert of(reverse_kl, p, q) == pytest.approx(reverse)


def test_beta_weighs_the_target_in_jensen_shannon():
    p, q, beta = [0.9, 0.1], [0.5, 0.5], 0.2
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
    expected = sum(
        beta * a * math.log(a / c) + (1 - beta) * b * math.log(b / c)
        for a, b, c in zip(p, q, m, strict=True)
    )
    assert of(jensen_shannon, p, q, beta=beta) == pytest.approx(expected)


@every_divergence
def test_gradients_equal_finite_differences(divergence):
    p_NV = logits(0, dtype=torch.float64)
    q_NV = logits(1, dtype=torch.float64).requires_grad_()
    loss = divergence(p_NV, q_NV, temperature=0.7).sum()
    loss.backward()
    evaluated = partial(divergence, p_NV, temperature=0.7)
    if divergence is lk_hybrid:  # its λ is a constant for the gradient
        tv_N = total_variation(p_NV, q_NV.detach(), temperature=0.7)
        share_N = torch.exp(-3 * (1 - tv_N))

        def evaluated(x_NV):
            kl_N = forward_kl(p_NV, x_NV, temperature=0.7)
            return share_N * kl_N + (1 - share_N) * total_variation(p_NV, x_NV, temperature=0.7)

    numeric_NV = finite_differences(lambda x_NV: evaluated(x_NV).sum(), q_NV.detach())
    torch.testing.assert_close(q_NV.grad, numeric_NV, atol=1e-8, rtol=1e-6)


def test_gradient_of_cross_entropy_equals_finite_differences():
    labels_N = torch.tensor([1, 4, 0])
    q_NV = logits(1).requires_grad_()
    cross_entropy(q_NV, labels_N).backward()
    numeric_NV = finite_differences(
        lambda x_NV: cross_entropy(x_NV, labels_N), q_NV.detach(), step=1e-3
    )
    torch.testing.assert_close(q_NV.grad, numeric_NV, atol=3e-4, rtol=1e-3)


def test_gradient_of_forward_kl_is_q_minus_p():
    p_NV, q_NV = logits(0), logits(1).requires_grad_()
    forward_kl(p_NV, q_NV).sum().backward()
    torch.testing.assert_close(q_NV.grad, (q_NV.softmax(-1) - p_NV.softmax(-1)).detach())


@every_divergence
def test_divergence_is_zero_iff_distributions_are_equal(divergence):
    p_NV = logits(0)
    # A shift of all logits leaves a distribution as it is.
    assert (divergence(p_NV, p_NV + 7.0).abs() < 1e-6).all()
    for seed in range(1, 20):
        assert (divergence(p_NV, p_NV + logits(seed, 0.2)) > 1e-5).all()


@every_divergence
def test_temperature_divides_both_logits(divergence):
    p_NV, q_NV = logits(0), logits(1)
    expected_N = divergence(p_NV / 0.5, q_NV / 0.5)
    torch.testing.assert_close(divergence(p_NV, q_NV, temperature=0.5), expected_N)
    assert not torch.allclose(divergence(p_NV, q_NV), expected_N)
    with pytest.raises(ValueError, match="temperature is 0"):
        divergence(p_NV, q_NV, temperature=0)


@every_divergence
def test_the_target_gets_no_gradient(divergence):
    p_NV, q_NV = logits(0).requires_grad_(), logits(1).requires_grad_()
    divergence(p_NV, q_NV).sum().backward()
    assert p_NV.grad is None
    assert q_NV.grad.abs().sum() > 0


@every_divergence
def test_only_weighted_positions_get_gradient(divergence):
    p_NV, q_NV = logits(0), logits(1).requires_grad_()
    loss = weighted_mean(divergence(p_NV, q_NV), torch.tensor([0, 1, 0]))
    loss.backward()
    assert loss == divergence(p_NV, q_NV)[1]
    assert (q_NV.grad != 0).any(-1).tolist() == [False, True, False]


@every_divergence
def test_tokens_that_neither_model_has_change_nothing(divergence):
    """Padded vocabulary entries have logits of -inf in both models."""
    never_N1 = torch.full((3, 1), -math.inf)
    p_NV, q_NV = logits(0), logits(1).requires_grad_()
    padded_N = divergence(torch.cat([p_NV, never_N1], -1), torch.cat([q_NV, never_N1], -1))
    padded_N.sum().backward()
    torch.testing.assert_close(padded_N, divergence(p_NV, q_NV.detach()))
    assert q_NV.grad.isfinite().all()


@every_divergence
def test_losses_are_computed_in_float32(divergence):
    p_NV, q_NV = logits(0).bfloat16(), logits(1).bfloat16()
    assert divergence(p_NV, q_NV).dtype == torch.float32
    torch.testing.assert_close(divergence(p_NV, q_NV), divergence(p_NV.float(), q_NV.float()))
    assert cross_entropy(q_NV, torch.tensor([0, 1, 2])).dtype == torch.float32


@every_divergence
def test_the_loss_is_per_position(divergence):
    p_NV, q_NV = logits(0), logits(1)
    rows = [divergence(p_NV[i : i + 1], q_NV[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(divergence(p_NV, q_NV), torch.cat(rows))


def test_total_variation_is_one_minus_alpha():
    p_NV, q_NV = logits(0), logits(1)
    torch.testing.assert_close(total_variation(p_NV, q_NV), 1 - acceptance(p_NV, q_NV, 1.0))


def test_negative_log_acceptance_is_clamped_where_nothing_is_accepted():
    p_NV = torch.tensor([[200.0, 0.0]])
    q_NV = torch.tensor([[0.0, 200.0]]).requires_grad_()
    loss_N = negative_log_acceptance(p_NV, q_NV)
    loss_N.sum().backward()
    assert loss_N.item() == pytest.approx(-math.log(SMALLEST_ACCEPTANCE), rel=1e-6)
    assert (q_NV.grad == 0).all()


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, math.nan])
def test_jensen_shannon_needs_a_weight_between_its_two_sides(beta):
    with pytest.raises(ValueError, match="beta is"):
        jensen_shannon(logits(0), logits(1), beta=beta)


def test_weighted_mean():
    loss_N = torch.tensor([1.0, 2.0, 4.0])
    assert weighted_mean(loss_N) == loss_N.mean()
    assert weighted_mean(loss_N, torch.tensor([1.0, 0.0, 3.0])) == 13 / 4
    assert weighted_mean(loss_N, torch.zeros(3)) == 0
    broken_N = torch.tensor([1.0, math.nan, math.inf])
    assert weighted_mean(broken_N, torch.tensor([True, False, False])) == 1
