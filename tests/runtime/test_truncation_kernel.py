"""The kernel truncates as torch's own operators do, which rank all tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.runtime.kernels.build import find_compiler, load_kernels
from outrider.runtime.kernels.truncation import truncated
from outrider.sampling.truncate import Truncation
from outrider.sampling.truncate import truncated as by_rank

pytestmark = [
    pytest.mark.vector_width,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    load_kernels()


ROWS = Truncation.of(
    [0, 5, 0, 0, 0, 12, 1, 10**6],
    [1.0, 1.0, 0.9, 0.9, 1.0, 0.7, 1.0, 0.5],
    [False, False, False, True, False, False, False, True],
    [0.0, 0.0, 0.0, 0.0, 0.05, 0.02, 0.0, 0.0],
    CPU,
)


@pytest.mark.parametrize("V", [1, 7, 64, 1000, 50_003])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_truncates_as_a_full_ranking_does(V: int, scale: float) -> None:
    """With equal probabilities, flat and peaked ones, whose smallest are 0; sizes with and without
    a remainder of a vector. The mass of flat distributions is summed in other orders, so that a
    token at the edge of a nucleus may be kept by one and not by the other."""
    generator = torch.Generator().manual_seed(V)
    p_BMV = (scale * torch.randn(8, 3, V, generator=generator)).softmax(-1)
    found_BMV, wanted_BMV = truncated(p_BMV, ROWS), by_rank(p_BMV, ROWS)
    assert ((found_BMV > 0) != (wanted_BMV > 0)).sum(-1).max() <= (V >= 1000)
    torch.testing.assert_close(found_BMV, wanted_BMV, rtol=1e-5, atol=3 / V * (V >= 1000) + 1e-7)
    assert torch.equal(found_BMV[0], p_BMV[0])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=80).filter(any),
    st.integers(0, 90),
    st.sampled_from([0.1, 0.3, 0.55, 0.8, 0.95, 1.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.2, 0.9, 1.0]),
)
def test_ties_are_broken_by_token_id(
    weights: list[int], top_k: int, top_p: float, strict: bool, min_p: float
) -> None:
    """Small whole weights make many ties. Their total is a power of two, so that all sums are exact
    and no mass equals these ``top_p``."""
    rest = 512 - sum(weights)
    p_BMV = torch.tensor([[[*weights, rest]]], dtype=torch.float32) / 512
    by = Truncation.of([top_k], [top_p], [strict], [min_p], CPU)
    if not top_k:
        torch.testing.assert_close(truncated(p_BMV, by), by_rank(p_BMV, by))
    kept_BMV = truncated(p_BMV, by)
    kept, p = kept_BMV[0, 0] > 0, p_BMV[0, 0]
    assert kept.any()
    torch.testing.assert_close(kept_BMV[0, 0], p * kept / p[kept].sum())
    least = p[kept].min()
    assert kept[p > least].all()  # a token goes only after all less probable ones
    assert (kept[p == least].long().diff() <= 0).all()  # and of ties the later ones first


def test_damaged_rows_pass_through() -> None:
    """NaN stays NaN, and is found by the check of the logits."""
    p_BMV = torch.rand(8, 2, 40).softmax(-1)
    p_BMV[2, 1] = torch.nan
    found_BMV = truncated(p_BMV, ROWS)
    assert found_BMV[2, 1].isnan().all()
    torch.testing.assert_close(found_BMV[3:], by_rank(p_BMV, ROWS)[3:])
