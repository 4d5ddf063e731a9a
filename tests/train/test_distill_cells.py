"""The target's top k and the tail: exact for k = V, and otherwise a lower bound."""

import math

import pytest
import torch

from outrider.train.distill.cells import Cells, log_cells, top_cells
from outrider.train.losses import DIVERGENCES, forward_kl, lk_hybrid

N, V = 40, 12
F_DIVERGENCES = {name: each for name, each in DIVERGENCES.items() if each is not lk_hybrid}


def logits(seed, scale=2.0):
    return scale * torch.randn(N, V, generator=torch.Generator().manual_seed(seed)).double()


def compared(divergence, p_NV, q_NV, k, temperature=1.0):
    """The divergence over the cells of the target's top k."""
    ids_Nk = top_cells(p_NV, k, temperature).ids_Nk
    return divergence(log_cells(p_NV, ids_Nk, temperature), log_cells(q_NV, ids_Nk, temperature))


def test_cells_are_the_largest_probabilities_and_the_rest():
    p_V = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    cells = top_cells(p_V.log(), 2)
    assert cells.ids_Nk.tolist() == [[1, 3]]
    torch.testing.assert_close(cells.log_p_NC.exp(), torch.tensor([[0.4, 0.3, 0.3]]))
    assert cells.ids_Nk.dtype == torch.int32
    q_V = torch.tensor([[0.7, 0.1, 0.1, 0.1]])
    torch.testing.assert_close(
        log_cells(q_V.log(), cells.ids_Nk).exp(), torch.tensor([[0.1, 0.1, 0.8]])
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_cells_are_normalised_at_every_temperature(temperature):
    cells = top_cells(logits(0), 5, temperature)
    torch.testing.assert_close(cells.log_p_NC.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    p_NV = (logits(0) / temperature).softmax(-1)
    torch.testing.assert_close(cells.log_p_NC[:, 0].exp(), p_NV.amax(-1))


def test_a_tail_of_tiny_mass_keeps_its_logarithm():
    """1 - Σ p_i would round to zero."""
    logits_NV = torch.tensor([[0.0, -30.0, -30.0]])
    expected = math.log(2) - 30
    assert log_cells(logits_NV, torch.tensor([[0]]))[0, 1].item() == pytest.approx(expected)


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize("k", [V, V + 5])
def test_all_tokens_give_the_exact_loss(divergence, k):
    p_NV, q_NV = logits(0), logits(1)
    torch.testing.assert_close(
        compared(divergence, p_NV, q_NV, k, 0.7), divergence(p_NV, q_NV, temperature=0.7)
    )


@pytest.mark.parametrize("divergence", F_DIVERGENCES.values(), ids=F_DIVERGENCES)
def test_fewer_tokens_give_a_lower_bound(divergence):
    p_NV, q_NV = logits(0), logits(1)
    exact_N = divergence(p_NV, q_NV)
    before_N = torch.zeros(N, dtype=torch.float64)
    for k in (1, 3, 6, 11):  # cells of a smaller k are unions of those of a larger one
        bound_N = compared(divergence, p_NV, q_NV, k)
        assert (bound_N <= exact_N + 1e-12).all()
        assert (bound_N >= before_N - 1e-12).all()
        before_N = bound_N
    assert (exact_N - compared(divergence, p_NV, q_NV, 3)).max() > 1e-3


def test_renormalised_top_k_would_be_no_bound():
    """The mutant that forgets the tail exceeds the divergence over the vocabulary somewhere."""
    p_NV, q_NV = logits(0), logits(1)
    ids_Nk = top_cells(p_NV, 3).ids_Nk.long()
    renormalised_N = forward_kl(p_NV.gather(-1, ids_Nk), q_NV.gather(-1, ids_Nk))
    assert (renormalised_N > forward_kl(p_NV, q_NV) + 1e-3).any()


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_the_truncated_loss_is_zero_where_the_distributions_are_equal(divergence):
    p_NV = logits(0)
    assert compared(divergence, p_NV, p_NV + 3.0, 4).abs().max() < 1e-12


def test_the_gradient_reaches_the_draft_through_the_tail():
    p_NV, q_NV = logits(0), logits(1).requires_grad_()
    compared(forward_kl, p_NV, q_NV, 3).sum().backward()
    ids_Nk = top_cells(p_NV, 3).ids_Nk.long()
    in_tail_NV = torch.ones(N, V, dtype=torch.bool).scatter(-1, ids_Nk, False)
    assert (q_NV.grad[in_tail_NV] != 0).all()
    torch.testing.assert_close(q_NV.grad.sum(-1), torch.zeros(N, dtype=torch.float64))


def test_cells_are_joined():
    cells = top_cells(logits(0), 3)
    halves = [
        Cells(cells.ids_Nk[:7], cells.log_p_NC[:7]),
        Cells(cells.ids_Nk[7:], cells.log_p_NC[7:]),
    ]
    joined = Cells.cat(halves)
    assert len(joined) == N
    assert torch.equal(joined.log_p_NC, cells.log_p_NC)
