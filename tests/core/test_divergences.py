"""Divergences between distributions: against scipy and exact sums, with zeros and infinities."""

import math
from fractions import Fraction

import pytest
import torch
from random_distributions import random_pairs
from scipy.special import rel_entr
from torch import Tensor

from outrider.core.divergences import Divergences, divergences


def distribution(*weights: float) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64)


def numbers(found: Divergences) -> list[float]:
    return [float(x) for x in (found.kl, found.rkl, found.tv, found.chi2)]


def test_by_hand() -> None:
    found = numbers(divergences(distribution(0.5, 0.5), distribution(0.25, 0.75)))
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    rkl = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)
    assert found == pytest.approx([kl, rkl, 1 / 4, 1 / 3], abs=1e-15)


def test_rational_distributions_to_the_last_digits() -> None:
    p, pi = [Fraction(n, 10) for n in (1, 2, 3, 4)], [Fraction(n, 20) for n in (5, 1, 6, 8)]
    tv = sum(abs(a - b) for a, b in zip(p, pi, strict=True)) / 2
    chi2 = sum(a * a / b for a, b in zip(p, pi, strict=True)) - 1
    found = divergences(distribution(*map(float, p)), distribution(*map(float, pi)))
    assert float(found.tv) == pytest.approx(float(tv), abs=1e-16)
    assert float(found.chi2) == pytest.approx(float(chi2), rel=1e-14)


def test_random_distributions_against_scipy() -> None:
    for p_V, pi_V in random_pairs(200, seed=1):
        found = divergences(p_V, pi_V)
        p, pi = p_V.numpy(), pi_V.numpy()
        assert float(found.kl) == pytest.approx(float(rel_entr(p, pi).sum()), abs=1e-12)
        assert float(found.rkl) == pytest.approx(float(rel_entr(pi, p).sum()), abs=1e-12)
        assert float(found.tv) == pytest.approx(float(abs(p - pi).sum() / 2), abs=1e-15)
        pairs = [(a, b) for a, b in zip(p.tolist(), pi.tolist(), strict=True) if a > 0]
        chi2 = math.fsum(math.inf if b == 0 else a * (a / b) for a, b in pairs) - 1
        assert float(found.chi2) == pytest.approx(chi2, rel=1e-9, abs=1e-12)


def test_subnormal_probabilities() -> None:
    found = divergences(distribution(1.0, 1e-310), distribution(1.0, 0.0))
    assert float(found.chi2) == math.inf
    assert float(found.kl) == math.inf


@pytest.mark.parametrize(
    ("p", "pi", "infinite"),
    [
        ((0.5, 0.5, 0.0), (1.0, 0.0, 0.0), {"kl", "chi2"}),
        ((1.0, 0.0, 0.0), (0.5, 0.5, 0.0), {"rkl"}),
        ((0.5, 0.5, 0.0), (0.5, 0.0, 0.5), {"kl", "rkl", "chi2"}),
        ((0.5, 0.5, 0.0), (0.25, 0.75, 0.0), set()),
    ],
)
def test_divergences_are_infinite_where_supports_differ(
    p: tuple[float, ...], pi: tuple[float, ...], infinite: set[str]
) -> None:
    found = divergences(distribution(*p), distribution(*pi))
    values = {"kl": found.kl, "rkl": found.rkl, "tv": found.tv, "chi2": found.chi2}
    assert {name for name, value in values.items() if value == math.inf} == infinite
    assert not any(value.isnan() for value in values.values())


def test_divergences_of_equal_distributions_are_zero() -> None:
    p_V = distribution(0.0, 0.3, 0.7, 0.0)
    assert numbers(divergences(p_V, p_V.clone())) == [0.0] * 4


def test_nothing_is_negative_after_rounding() -> None:
    for p_V, _ in random_pairs(64, seed=2):
        pi_V = p_V * (1 + 1e-15 * torch.randn(p_V.shape, dtype=torch.float64))
        assert min(numbers(divergences(p_V, pi_V / pi_V.sum()))) >= 0


def test_leading_dimensions_broadcast_and_float32_is_summed_in_float64() -> None:
    p_MV, pi_V = torch.rand(2, 3, 5).softmax(-1), torch.rand(5).softmax(-1)
    found = divergences(p_MV, pi_V)
    assert found.kl.shape == (2, 3)
    for value in (found.kl, found.rkl, found.tv, found.chi2):
        assert value.dtype == torch.float64
    single = divergences(p_MV[1, 2].double(), pi_V.double())
    assert [float(x[1, 2]) for x in (found.kl, found.rkl, found.tv, found.chi2)] == numbers(single)
