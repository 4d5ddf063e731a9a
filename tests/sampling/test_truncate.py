"""Which tokens top-k, top-p and min-p keep."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling import Sampling, Warp, truncate
from outrider.sampling.truncate import keep_min_p, keep_top_k, keep_top_p
from outrider.sampling.warp import distributions


def distribution(values):
    return torch.tensor(values, dtype=torch.float64)[None, None]


def full_sort_top_p(p_V, top_p, strict):
    """Reference implementation: sorts everything, equal probabilities by token id."""
    order_V = p_V.argsort(descending=True, stable=True)
    keep_V, before = torch.zeros_like(p_V, dtype=torch.bool), torch.zeros((), dtype=p_V.dtype)
    for rank, token in enumerate(order_V.tolist()):
        if rank and (before > top_p if strict else before >= top_p):
            break
        keep_V[token] = True
        before = before + p_V[token]
    return keep_V


@pytest.mark.parametrize(
    ("values", "top_p", "hf", "paper"),
    [([0.5, 0.3, 0.15, 0.05], 0.8, 2, 3), ([0.25, 0.25, 0.25, 0.25], 0.5, 2, 3)],
)
def test_the_two_conventions_differ_at_the_boundary(values, top_p, hf, paper):
    """The worked examples: the mass before a token equals ``top_p`` exactly."""
    p_BMV = distribution(values)
    assert keep_top_p(p_BMV, [top_p], [False])[0, 0].tolist() == [i < hf for i in range(4)]
    assert keep_top_p(p_BMV, [top_p], [True])[0, 0].tolist() == [i < paper for i in range(4)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=40),
    st.floats(1e-6, 0.999),
    st.booleans(),
    st.sampled_from([1, 3, 256]),
)
def test_the_partial_ranking_keeps_what_a_full_sort_keeps(weights, top_p, strict, first):
    """Small whole weights make many ties."""
    p_V = torch.tensor(weights, dtype=torch.float64)
    p_V = p_V / p_V.sum()
    before, truncate._FIRST_RANKED = truncate._FIRST_RANKED, first
    try:
        kept_V = keep_top_p(p_V[None, None], [top_p], [strict])[0, 0]
    finally:
        truncate._FIRST_RANKED = before
    assert kept_V.tolist() == full_sort_top_p(p_V, top_p, strict).tolist()


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_partial_ranking_of_a_large_vocabulary(scale):
    """Flat distributions need more tokens than the first ranking has, peaked ones do not."""
    z_V = scale * torch.randn(5000, dtype=torch.float64)
    p_V = z_V.softmax(0)
    for top_p in (0.05, 0.5, 0.95, 0.9999):
        kept_V = keep_top_p(p_V[None, None], [top_p], [False])[0, 0]
        assert (kept_V == full_sort_top_p(p_V, top_p, False)).all()


def test_ties_are_broken_by_token_id():
    p_BMV = distribution([0.1, 0.2, 0.2, 0.2, 0.1, 0.2])
    assert keep_top_p(p_BMV, [0.35], [False])[0, 0].nonzero()[:, 0].tolist() == [1, 2]
    assert keep_top_p(p_BMV, [0.85], [False])[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 5]


def test_top_p_of_one_keeps_all_of_a_large_vocabulary():
    """A float32 sum of 128k probabilities may pass 1 before its end."""
    p_BMV = torch.randn(4, 1, 128_000).softmax(-1)
    assert keep_top_p(p_BMV, [1.0] * 4, [False, True, False, True]).all()
    kept = keep_top_p(p_BMV, [1.0, 0.5, 1.0, 0.9], [False] * 4)
    assert kept[0].all()
    assert kept[2].all()
    assert not kept[1].all()
    assert not kept[3].all()


def test_at_least_one_token_survives():
    p_BMV = distribution([0.2, 0.5, 0.3])
    for strict in (False, True):
        assert keep_top_p(p_BMV, [1e-12], [strict])[0, 0].tolist() == [False, True, False]
    assert keep_min_p(p_BMV, [1.0])[0, 0].tolist() == [False, True, False]


def test_top_k_keeps_ties_and_is_off_at_zero():
    z_BMV = distribution([3.0, 1.0, 2.0, 2.0, -torch.inf])
    assert keep_top_k(z_BMV, [2])[0, 0].tolist() == [True, False, True, True, False]
    assert keep_top_k(z_BMV, [1])[0, 0].tolist() == [True, False, False, False, False]
    assert keep_top_k(z_BMV, [0]).all()
    assert keep_top_k(z_BMV, [5]).all()
    assert keep_top_k(z_BMV, [99]).all()


def test_each_row_has_its_own_parameter():
    z_BMV = torch.randn(4, 3, 20, dtype=torch.float64)
    p_BMV = z_BMV.softmax(-1)
    ks, ps, ms = [0, 1, 7, 99], [1.0, 0.2, 0.7, 0.99], [0.0, 0.3, 1.0, 0.01]
    strict = [False, True, False, True]
    by_k, by_p, by_m = keep_top_k(z_BMV, ks), keep_top_p(p_BMV, ps, strict), keep_min_p(p_BMV, ms)
    for b in range(4):
        row = slice(b, b + 1)
        assert (keep_top_k(z_BMV[row], ks[row]) == by_k[row]).all()
        assert (keep_top_p(p_BMV[row], ps[row], strict[row]) == by_p[row]).all()
        assert (keep_min_p(p_BMV[row], ms[row]) == by_m[row]).all()


TRUNCATIONS = [
    (0, 1.0, "hf", 0.0),
    (5, 1.0, "hf", 0.0),
    (0, 0.9, "hf", 0.0),
    (0, 0.9, "paper", 0.0),
    (0, 1.0, "hf", 0.05),
    (12, 0.7, "hf", 0.02),
    (1, 1.0, "hf", 0.0),
    (10**6, 0.5, "paper", 0.0),
]


def warp(num_tokens):
    return Warp(
        [
            Sampling(temperature=1.0, top_k=k, top_p=p, top_p_convention=convention, min_p=m)
            for k, p, convention, m in TRUNCATIONS
        ],
        num_tokens,
    )


@pytest.mark.parametrize("V", [3, 37, 5000])
@pytest.mark.parametrize("scale", [0.2, 2.0, 8.0])
def test_parameters_as_tensors_truncate_as_those_on_the_host(V, scale):
    """Flat and peaked distributions, with every parameter alone and with all together."""
    generator = torch.Generator().manual_seed(V)
    z_BMV = scale * torch.randn(len(TRUNCATIONS), 4, V, generator=generator)
    found_BMV = distributions(z_BMV, warp(V).row_parameters)
    torch.testing.assert_close(found_BMV, warp(V)(z_BMV, None))
    assert torch.equal(found_BMV[0], z_BMV[0].softmax(-1))  # without parameters: the same bits


def test_parameters_as_tensors_break_ties_as_those_on_the_host():
    weights_V = torch.tensor([1, 4, 2, 2, 4, 2, 1, 8, 8, 2], dtype=torch.float32)
    z_BMV = weights_V.log().expand(len(TRUNCATIONS), 1, -1)
    torch.testing.assert_close(distributions(z_BMV, warp(10).row_parameters), warp(10)(z_BMV, None))
