"""Triton's kernel truncates as torch's own operators do, which rank all tokens."""

import pytest
import torch
from gpu_here import DEVICE, NEEDS_TRITON
from hypothesis import given, settings
from hypothesis import strategies as st
from test_truncation_kernel import ROWS as ROWS_ON_CPU

from outrider.runtime.kernels.truncation import truncate_on
from outrider.sampling.truncate import Truncation
from outrider.sampling.truncate import truncated as by_rank

HERE = torch.device(DEVICE)
ROWS = Truncation(*(each.to(HERE) for each in ROWS_ON_CPU))


def by_kernel(p_BMV: torch.Tensor, by: Truncation) -> torch.Tensor:
    from outrider.runtime.kernels.gpu_truncation import truncated

    return truncated(p_BMV, by)


@NEEDS_TRITON
@pytest.mark.parametrize("V", [1, 7, 64, 1000, 2500])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_truncates_as_a_full_ranking_does(V: int, scale: float) -> None:
    """As in ``test_truncation_kernel.py``: of flat distributions, a token at the edge of a nucleus
    may be kept by one and not by the other."""
    generator = torch.Generator().manual_seed(V)
    p_BMV = (scale * torch.randn(8, 2, V, generator=generator)).softmax(-1).to(HERE)
    found_BMV, wanted_BMV = by_kernel(p_BMV, ROWS), by_rank(p_BMV, ROWS)
    assert ((found_BMV > 0) != (wanted_BMV > 0)).sum(-1).max() <= (V >= 1000)
    torch.testing.assert_close(found_BMV, wanted_BMV, rtol=1e-5, atol=3 / V * (V >= 1000) + 1e-7)
    assert torch.equal(found_BMV[0], p_BMV[0])


@NEEDS_TRITON
@settings(deadline=None, max_examples=200 if DEVICE == "cuda" else 15, derandomize=True)
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
    """The total of the weights is a power of two, so that all sums are exact."""
    rest = 512 - sum(weights)
    p_BMV = torch.tensor([[[*weights, rest]]], dtype=torch.float32, device=HERE) / 512
    by = Truncation.of([0], [top_p], [strict], [min_p], HERE)
    torch.testing.assert_close(by_kernel(p_BMV, by), by_rank(p_BMV, by))
    kept_V = by_kernel(p_BMV, by._replace(top_k_B=torch.tensor([top_k], device=HERE)))[0, 0] > 0
    p_V = p_BMV[0, 0]
    least = p_V[kept_V].min()
    assert kept_V[p_V > least].all()
    assert (kept_V[p_V == least].long().diff() <= 0).all()


@NEEDS_TRITON
def test_edges_of_the_nucleus_that_sums_meet_exactly() -> None:
    """Half of the mass is in two tokens of eight. The two conventions differ in what follows."""
    p_BMV = torch.tensor([4, 1, 1, 4, 2, 2, 1, 1], device=HERE).float().expand(2, 1, 8) / 16
    by = Truncation.of([0, 0], [0.5, 0.5], [False, True], [0.0, 0.0], HERE)
    assert by_kernel(p_BMV, by)[:, 0].gt(0).tolist() == [
        [True, False, False, True, False, False, False, False],
        [True, False, False, True, True, False, False, False],
    ]


@NEEDS_TRITON
def test_damaged_rows_pass_through() -> None:
    p_BMV = torch.rand(8, 2, 40).softmax(-1).to(HERE)
    p_BMV[2, 1] = torch.nan
    assert by_kernel(p_BMV, ROWS)[2, 1].isnan().all()


@NEEDS_TRITON
def test_nothing_to_truncate() -> None:
    assert by_kernel(torch.empty(8, 0, 5, device=HERE), ROWS).shape == (8, 0, 5)


@NEEDS_TRITON
def test_the_kernel_is_used() -> None:
    """With the interpreter, too: the example is computed on the device that is named."""
    from outrider.runtime.kernels import gpu_truncation

    assert truncate_on(HERE) is gpu_truncation.truncated
