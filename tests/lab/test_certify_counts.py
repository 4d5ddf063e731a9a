"""The statistics of ``certify``: tails, power, false alarms."""

import pytest
import scipy.stats
import torch

from outrider.lab.certify import two_sample
from outrider.lab.certify.counts import Tally, check_tallies
from outrider.lab.certify.two_sample import (
    check,
    chi2_tail,
    detectable_deviation,
    homogeneity,
    ncx2_tail,
)


@pytest.mark.parametrize("degrees", [1, 4, 60])
@pytest.mark.parametrize("noncentrality", [0.0, 0.3, 25.0, 800.0, 50_000.0])
def test_the_noncentral_tail_equals_scipy(degrees: int, noncentrality: float) -> None:
    for x in (0.5, degrees + noncentrality, 1.2 * (degrees + noncentrality) + 20):
        ours, theirs = ncx2_tail(x, degrees, noncentrality), _scipy(x, degrees, noncentrality)
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-13)


def _scipy(x: float, degrees: int, noncentrality: float) -> float:
    if noncentrality == 0:
        return float(scipy.stats.chi2.sf(x, degrees))
    return float(scipy.stats.ncx2.sf(x, degrees, noncentrality))


def test_the_central_tail_equals_scipy() -> None:
    for x, degrees in ((0.1, 1), (30.0, 8), (200.0, 60)):
        assert chi2_tail(x, degrees) == pytest.approx(scipy.stats.chi2.sf(x, degrees), rel=1e-10)


def test_the_detectable_deviation_is_found_with_the_stated_probability() -> None:
    """At the least favourable alternative, for which Cauchy-Schwarz is tight.

    Of 400 repetitions, 4 are expected to miss the deviation; more than 16 do so with probability
    1e-6. Without a deviation, 2 false alarms are expected; more than 10 have probability 1e-5.
    """
    n, C, false_alarm = 1000, 8, 5e-3
    δ = detectable_deviation(n, C - 1, false_alarm)
    generator = torch.Generator().manual_seed(0)
    base_C = torch.full((C,), 1 / C)
    shifted_C = base_C + 2 * δ / C * torch.tensor([0.5, -0.5] * (C // 2))
    base_C = base_C - 2 * δ / C * torch.tensor([0.5, -0.5] * (C // 2))
    assert 0.5 * (base_C - shifted_C).abs().sum().item() == pytest.approx(δ, rel=1e-4)

    def rejected(probs_C: torch.Tensor, other_C: torch.Tensor) -> int:
        count = 0
        for _ in range(400):
            a_B1, b_B1 = (
                torch.multinomial(l_C, n, replacement=True, generator=generator)[:, None]
                for l_C in (probs_C, other_C)
            )
            count += homogeneity(a_B1, b_B1).p_value < false_alarm
        return count

    assert rejected(base_C, shifted_C) >= 384
    assert rejected(base_C, base_C) <= 10


def test_rare_outputs_are_pooled() -> None:
    rare_B1 = torch.arange(400)[:, None]
    assert homogeneity(rare_B1, rare_B1 + 1000).degrees == 0
    common_B1 = torch.zeros(1000, 1, dtype=torch.int64)
    both = homogeneity(torch.cat([common_B1, rare_B1 + 1]), torch.cat([common_B1, rare_B1 + 5000]))
    assert both.degrees == 1
    assert both.statistic == 0


def test_statistics_of_prompts_add_up() -> None:
    """λ is 2 n m δ² for m prompts, so only the total number of outputs matters."""
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(4, (2000, 2), generator=generator) for _ in range(4)]
    equal = check(samples[:2], samples[2:], True)
    assert equal.passed
    assert "4000 outputs of 2 tokens" in equal.words
    worse = check(samples[:2], [(part + 1).clamp(max=3) for part in samples[2:]], True)
    assert worse.passed is False
    assert check(samples[:2], samples[2:], False).passed is None


def test_too_few_outputs_claim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sample, "_MIN_COUNT", 2)
    few_BT = torch.arange(8)[:, None] % 2
    assert "too few" in check([few_BT], [few_BT], True).claim
    same = torch.zeros(30, 6, dtype=torch.int64)
    assert check([same], [same], True).passed is None


def test_draws_from_their_distributions_pass_and_others_fail() -> None:
    """A correct drafter fails with probability below 2.5e-4, by Bernstein's inequality."""
    generator = torch.Generator().manual_seed(2)
    q_BV = torch.randn(4000, 12, generator=generator).softmax(1)
    before_B = torch.randint(3, (4000,), generator=generator)
    right_B = torch.multinomial(q_BV, 1, generator=generator)[:, 0]
    best_B = q_BV.argmax(1)
    half_B = torch.where(torch.arange(4000) % 4 == 0, best_B, right_B)
    passed = []
    for x_B in (right_B, best_B, half_B):
        tally = Tally()
        for part in range(4):
            rows = slice(1000 * part, 1000 * (part + 1))
            tally.add(x_B[rows], q_BV[rows], before_B[rows])
        passed.append(check_tallies("drafts", [tally], "tokens").passed)
    assert passed == [True, False, False]


def test_one_draw_of_an_impossible_token_fails() -> None:
    tally = Tally()
    q_BV = torch.tensor([[0.5, 0.5, 0.0]]).repeat(100, 1)
    x_B = torch.arange(100) % 2
    x_B[7] = 2
    tally.add(x_B, q_BV, torch.zeros(100, dtype=torch.int64))
    found = check_tallies("drafts", [tally], "tokens")
    assert found.passed is False
    assert "probability zero" in found.words
