"""Large vocabularies: binning finds the same solution as sorting, or reports that it cannot.

Legend: R rows, V vocabulary.
"""

import pytest
import torch
from torch import Tensor

from outrider.core import output_distribution
from outrider.verifiers.clamp import sorted_path
from outrider.verifiers.mentored import Mentored
from outrider.verifiers.zoom import zoom

DIVERGENCES = ("kl", "rkl", "tv", "chi2")


def large_distributions(
    noise: float, seed: int, dtype: torch.dtype, V: int = 20_000
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z_RV = 3 * torch.randn(4, V, generator=g, dtype=dtype)
    q_RV = (z_RV + noise * torch.randn(4, V, generator=g, dtype=dtype)).softmax(1)
    return z_RV.softmax(1), q_RV


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_same_solution_as_by_sorting(divergence: str, dtype: torch.dtype) -> None:
    solved = 0
    for seed, (noise, D) in enumerate(
        [(0.8, 0.1), (0.8, 0.02), (2.0, 0.1), (2.0, 0.5), (0.3, 0.2), (0.3, 0.02), (0.05, 0.0005)]
    ):
        p_RV, q_RV = large_distributions(noise, seed, dtype)
        found, exact_R = zoom(divergence, p_RV, q_RV, D)  # type: ignore[arg-type]
        path = sorted_path(divergence, p_RV, q_RV, False)  # type: ignore[arg-type]
        twin = path.clamp(path.exact(D))
        torch.testing.assert_close(found.alpha_R[exact_R], twin.alpha_R[exact_R], rtol=2e-6, atol=0)
        some_R = exact_R & (twin.alpha_R > 0)
        torch.testing.assert_close(found.b_R[some_R], twin.b_R[some_R], rtol=2e-6, atol=0)
        solved += int(exact_R.sum())
    assert solved >= 14


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_budget_is_met_on_a_large_vocabulary(divergence: str) -> None:
    """By binning or, for the rows that binning leaves, by sorting."""
    for seed, (noise, D) in enumerate([(0.8, 0.1), (2.0, 0.3), (0.8, 1e-3)]):
        p_RV, q_RV = large_distributions(noise, seed, torch.float64)
        p_RV[1, ::2] = 0  # zeros in both distributions
        q_RV[1, ::3] = 0
        p_RV[2], q_RV[2] = p_RV[3], p_RV[3] * (1 + 1e-6 * torch.rand(20_000).double())
        p_RV, q_RV = p_RV / p_RV.sum(1, keepdim=True), q_RV / q_RV.sum(1, keepdim=True)
        rule = Mentored(D, divergence)  # type: ignore[arg-type]
        pi_RV = output_distribution(rule, p_RV, q_RV)
        if divergence == "kl":
            terms_RV = torch.where(p_RV > 0, p_RV * (p_RV / pi_RV).log(), 0.0)
        elif divergence == "rkl":
            terms_RV = torch.where(pi_RV > 0, pi_RV * (pi_RV / p_RV).log(), 0.0)
        elif divergence == "tv":
            terms_RV = (p_RV - pi_RV).abs() / 2
        else:
            terms_RV = torch.where(p_RV > 0, p_RV**2 / pi_RV, 0.0) - p_RV
        reached_R = terms_RV.sum(1)
        assert bool((reached_R <= D + 1e-13).all())
        met_R = reached_R >= D * (1 - 1e-6) - 1e-13
        whole_R = rule.solve(p_RV, q_RV, None).alpha_R == 0
        assert bool((met_R | whole_R).all())
        assert bool(met_R[0])


def test_rows_that_binning_cannot_solve_are_reported() -> None:
    """Nearly equal distributions, zeros, and a budget too small for the width of the bins."""
    p_RV, q_RV = large_distributions(0.8, 1, torch.float64)
    assert not bool(zoom("kl", p_RV, q_RV, 1e-7)[1].any())
    p_RV[:, 0] = 0
    assert not bool(zoom("kl", p_RV / p_RV.sum(1, keepdim=True), q_RV, 0.1)[1].any())
