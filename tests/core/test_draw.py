"""Inverse-CDF draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import draw, draw_distinct
from outrider.core.draw import _within
from outrider.testing import chi2_p_value


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


BELOW_ONE = 1 - 2.0**-52
weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=12).filter(
    any
)
uniforms = st.one_of(
    st.just(0.0), st.just(BELOW_ONE), st.integers(0, 2**52 - 1).map(lambda k: k * 2.0**-52)
)


@given(weights, uniforms)
def test_a_token_of_weight_zero_is_never_drawn(row, u):
    token = draw(tensor([row]), tensor([u]))
    assert row[int(token)] > 0


@given(weights, st.lists(uniforms, min_size=2, max_size=2).map(sorted))
def test_tokens_are_monotone_in_their_number(row, pair):
    tokens = draw(tensor([row, row]), torch.tensor(pair).double())
    assert tokens[0] <= tokens[1]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=8).filter(any), st.integers(0, 1000))
def test_the_token_is_the_one_whose_share_holds_u(row, k):
    """Small whole weights, so that the comparison is exact."""
    u = k * 2.0**-10
    share, expected = 0, -1
    while share <= u * sum(row):
        expected += 1
        share += row[expected]
    token = draw(tensor([row]), tensor([u]))
    assert int(token) == expected


def test_extremes_draw_the_first_and_last_possible_token():
    row = tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0]).expand(2, 7)
    assert draw(row, tensor([0.0, BELOW_ONE])).tolist() == [2, 4]


def test_float32_weights_are_summed_in_float64():
    """In float32 the tail of a large vocabulary would vanish behind the head's sum."""
    row = torch.full((1, 200_000), 1e-9)
    row[0, 0] = 1.0
    token = draw(row, tensor([BELOW_ONE]))
    assert int(token) == 199_999


def test_rows_are_independent():
    row = torch.rand(50, 9).double()
    u = torch.rand(50).double()
    alone = torch.cat([draw(row[b : b + 1], u[b : b + 1]) for b in range(50)])
    assert (draw(row, u) == alone).all()


@pytest.mark.parametrize("num_tokens", [8192, 8193, 9000])
def test_large_vocabularies_draw_block_by_block_what_a_running_sum_draws(num_tokens):
    """Both searches agree on integer weights, for which all sums are exact; half of them are 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    row_BV = torch.randint(0, 4, (400, num_tokens), generator=generator).clamp(min=1) - 1.0
    row_BV[0, :-1] = row_BV[1, 1:] = 0
    row_BV[0, -1] = row_BV[1, 0] = 1
    for u_B in (
        torch.rand(400, generator=generator, dtype=torch.float64),
        torch.zeros(400, dtype=torch.float64),
        torch.full((400,), BELOW_ONE, dtype=torch.float64),
    ):
        for weights_BV in (row_BV, row_BV.double()):
            token_B = draw(weights_BV, u_B)
            assert (token_B == _within(weights_BV, u_B)).all()
            assert (weights_BV.gather(1, token_B[:, None]) > 0).all()


@pytest.mark.parametrize("num_tokens", [9, 8192, 8193, 9000])
def test_distinct_draws_are_draws_from_what_is_left(num_tokens):
    """On integer weights, for which all sums are exact. Rows run out of tokens, and draw several of
    one block."""
    generator = torch.Generator().manual_seed(num_tokens)
    row_BV = torch.randint(0, 4, (60, num_tokens), generator=generator).clamp(min=1) - 1.0
    row_BV[0, :-1] = row_BV[1, 1:] = 0
    row_BV[0, -1] = row_BV[1, 0] = 1
    row_BV[2:5, 7:] = 0
    u_Bk = torch.rand(60, 6, generator=generator, dtype=torch.float64)
    for weights_BV in (row_BV, row_BV.double()):
        token_Bk, weight_Bk = draw_distinct(weights_BV, u_Bk)
        left_BV = weights_BV.clone()
        for u_B, token_B, weight_B in zip(
            *(x.unbind(1) for x in (u_Bk, token_Bk, weight_Bk)), strict=True
        ):
            exists_B = left_BV.sum(1) > 0
            assert (token_B == _within(left_BV, u_B))[exists_B].all()
            assert (weight_B == left_BV.gather(1, token_B[:, None])[:, 0]).all()
            assert ((weight_B > 0) == exists_B).all()
            left_BV.scatter_(1, token_B[:, None], 0.0)


@pytest.mark.slow
def test_large_vocabularies_have_the_distribution():
    """False alarm with probability 1e-4."""
    p_V = (3 * torch.randn(9216, generator=torch.Generator().manual_seed(0))).softmax(-1)
    u_B = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts_V = sum(
        torch.bincount(draw(p_V.expand(len(part_B), -1), part_B), minlength=9216)
        for part_B in u_B.split(5000)
    )
    assert chi2_p_value(counts_V, p_V) > 1e-4
