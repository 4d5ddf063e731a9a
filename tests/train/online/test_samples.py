"""Divergences over the top tokens and the tail: bounds, equality, and gradients.

Legend: P positions, K top tokens, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from outrider.train.losses import DIVERGENCES
from outrider.train.online.samples import Sample, log_q_of_cells

P, V = 5, 11


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(P, V, generator=generator)


def sample_of(logits_PV: Tensor, k: int) -> Sample:
    top = logits_PV.log_softmax(-1).topk(k)
    ids = top.indices.to(torch.int32)
    return Sample(torch.arange(P), torch.arange(P), ids, top.values, V)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 3, V - 1, V])
def test_cells_divide_the_probability(name: str, k: int) -> None:
    sample = sample_of(logits(0), k)
    log_q_PC = log_q_of_cells(logits(1), sample)
    for log_PC in (sample.log_p_PC, log_q_PC):
        assert log_PC.shape == (P, min(k + 1, V))
        torch.testing.assert_close(log_PC.exp().sum(1), torch.ones(P))
    coarse_P = DIVERGENCES[name](sample.log_p_PC, log_q_PC)
    exact_P = DIVERGENCES[name](logits(0), logits(1))
    assert (coarse_P <= exact_P + 1e-5).all()
    if k >= V - 1:
        torch.testing.assert_close(coarse_P, exact_P, atol=1e-4, rtol=1e-4)
    else:
        assert (coarse_P < exact_P - 1e-4).any()


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 3, V])
def test_a_divergence_is_zero_where_the_distributions_are_equal(name: str, k: int) -> None:
    sample = sample_of(logits(0), k)
    equal_P = DIVERGENCES[name](sample.log_p_PC, log_q_of_cells(logits(0) + 3.0, sample))
    torch.testing.assert_close(equal_P, torch.zeros(P), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 3, V])
def test_gradients_are_finite_differences(k: int) -> None:
    sample = sample_of(logits(0).double(), k)
    x_PV = logits(1).double().requires_grad_()

    def loss(q_PV: Tensor) -> Tensor:
        log_q_PV = q_PV.log_softmax(-1)
        ids_PK = sample.ids_PK.long()
        cells = [log_q_PV.gather(1, ids_PK)]
        if k < V:
            rest_P1 = 1 - log_q_PV.gather(1, ids_PK).exp().sum(1, keepdim=True)
            cells.append(rest_P1.log())
        log_p_PC = sample.log_p_PC
        return (log_p_PC.exp() * (log_p_PC - torch.cat(cells, 1))).sum()

    DIVERGENCES["forward-kl"](sample.log_p_PC, log_q_of_cells(x_PV, sample)).sum().backward()
    (wanted_PV,) = torch.autograd.grad(loss(x_PV), x_PV)
    assert x_PV.grad is not None
    torch.testing.assert_close(x_PV.grad, wanted_PV, atol=1e-5, rtol=1e-4)
    step = 1e-6
    bumped_PV = x_PV.detach().clone()
    bumped_PV[2, 4] += step
    difference = (loss(bumped_PV) - loss(x_PV.detach())) / step
    torch.testing.assert_close(x_PV.grad[2, 4], difference, atol=1e-4, rtol=1e-3)


def test_a_certain_target_has_no_tail() -> None:
    sure_PV = torch.full((P, V), -100.0)
    sure_PV[:, 2] = 100.0
    sample = sample_of(sure_PV, 3)
    x_PV = logits(1).requires_grad_()
    loss = DIVERGENCES["forward-kl"](sample.log_p_PC, log_q_of_cells(x_PV, sample)).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert x_PV.grad is not None
    assert torch.isfinite(x_PV.grad).all()


def test_a_wider_draft_is_cut_to_the_targets_vocabulary() -> None:
    sample = sample_of(logits(0), V)
    wider_PV = torch.cat([logits(0), torch.full((P, 4), 9.0)], 1)
    torch.testing.assert_close(log_q_of_cells(wider_PV, sample), sample.log_p_PC)
