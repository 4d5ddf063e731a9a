"""Estimators of α against exact enumeration and simulation."""

import itertools
import math
import random

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.acceptance import (
    alpha_by_position,
    alpha_of_counts,
    alpha_of_rate,
    alpha_of_samples,
    alpha_of_totals,
    expected_acceptance_rate,
    overlap,
    wilson,
)
from outrider.lab.analysis.tokens_per_round import token_probabilities

P, Q = [0.5, 0.3, 0.15, 0.05], [0.2, 0.1, 0.3, 0.4]


def simulated(alpha: float, gamma: int, rounds: int, seed: int) -> list[int]:
    """Accepted tokens of each round."""
    generator = random.Random(seed)
    weights = token_probabilities(alpha, gamma)
    return generator.choices(range(gamma + 1), weights, k=rounds)


def test_the_overlap_is_the_probability_of_acceptance() -> None:
    """By enumeration of the drafted token: accepted with probability min(1, p/q)."""
    accepted = sum(q * min(1.0, p / q) for p, q in zip(P, Q, strict=True))
    variation = 0.5 * sum(abs(p - q) for p, q in zip(P, Q, strict=True))
    assert overlap(P, Q) == pytest.approx(accepted) == pytest.approx(1 - variation)
    assert overlap(P, P) == 1
    assert overlap([1.0, 0.0], [0.0, 1.0]) == 0


def test_p_at_the_drafted_token_is_no_estimate_of_alpha() -> None:
    """min(p, q) at the drafted token, which a published implementation logs as α, is far too low:
    its mean is Σ q min(p, q)."""
    logged = sum(q * min(p, q) for p, q in zip(P, Q, strict=True))
    assert logged < 0.35 * overlap(P, Q)


def test_single_draws_are_unbiased() -> None:
    """100,000 draws of min(1, p/q): within 5 standard errors, a false alarm below 1e-6."""
    generator = random.Random(2)
    drawn = generator.choices(range(4), Q, k=100_000)
    found = alpha_of_samples([min(1.0, P[x] / Q[x]) for x in drawn])
    assert abs(found.value - overlap(P, Q)) < 5 * found.error
    assert found.error < 0.002
    assert alpha_of_samples([0.5]).error == math.inf


def test_the_acceptance_rate_is_biased_by_exactly_the_stated_amount() -> None:
    for alpha, gamma in itertools.product((0.0, 0.3, 0.8, 1.0), (1, 4, 9)):
        exact = sum(n * p for n, p in enumerate(token_probabilities(alpha, gamma))) / gamma
        assert expected_acceptance_rate(alpha, gamma) == pytest.approx(exact)
        assert exact <= alpha + 1e-12
        assert alpha_of_rate(exact, gamma) == pytest.approx(alpha, abs=1e-9)
    assert expected_acceptance_rate(0.8, 4) == pytest.approx(0.5904)  # far from 0.8


def test_the_estimate_from_counts_has_the_maximum_likelihood() -> None:
    accepted, drafted = [0, 3, 1, 4, 4, 2], [4, 4, 4, 4, 4, 3]

    def log_likelihood(alpha: float) -> float:
        return sum(
            n * math.log(alpha) + (math.log(1 - alpha) if n < gamma else 0.0)
            for n, gamma in zip(accepted, drafted, strict=True)
        )

    found = alpha_of_counts(accepted, drafted)
    assert found.value == 14 / 18
    grid = [i / 1000 for i in range(1, 1000)]
    assert max(grid, key=log_likelihood) == pytest.approx(found.value, abs=1e-3)
    assert alpha_of_totals(14, 18) == found


def test_the_estimate_from_counts_converges_and_its_error_is_right() -> None:
    """400 runs of 500 rounds. The mean error is within 5 standard errors of 0, and the spread
    within 20 % of the stated error: false alarms below 1e-6 (the spread of 400 runs has a relative
    standard error of 3.5 %)."""
    alpha, gamma = 0.7, 5
    runs = [alpha_of_counts(simulated(alpha, gamma, 500, s), [gamma] * 500) for s in range(400)]
    mean = sum(run.value for run in runs) / len(runs)
    spread = math.sqrt(sum((run.value - mean) ** 2 for run in runs) / (len(runs) - 1))
    assert abs(mean - alpha) < 5 * spread / math.sqrt(len(runs))
    stated = sum(run.error for run in runs) / len(runs)
    assert spread == pytest.approx(stated, rel=0.2)


def test_acceptance_by_position_shows_a_mixture() -> None:
    """Exact expectations of 1,000 easy rounds (α 0.9) and 1,000 hard ones (α 0.3): the acceptance
    of survivors rises with the position, although it is constant in each kind of round."""
    verified = [round(1000 * 0.9**i + 1000 * 0.3**i) for i in range(5)]
    accepted = [round(1000 * 0.9 ** (i + 1) + 1000 * 0.3 ** (i + 1)) for i in range(5)]
    shares = [share for share, _, _ in alpha_by_position(accepted, verified)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.6)
    assert shares[4] > 0.85
    assert alpha_by_position([3], [5, 0, 0]) == [(0.6, *wilson(3, 5))]
    assert alpha_by_position([], []) == []


def test_intervals_cover_the_truth() -> None:
    """Wilson's intervals of 95 % for 40 trials, by exact summation over all outcomes."""
    for share in (0.1, 0.35, 0.8):
        covered = 0.0
        for k in range(41):
            low, high = wilson(k, 40)
            covered += (
                math.comb(40, k) * share**k * (1 - share) ** (40 - k) * (low <= share <= high)
            )
        assert 0.92 < covered < 0.985
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: alpha_of_samples([]), "at least one position"),
        (lambda: alpha_of_counts([5], [4]), "more tokens than it drafted"),
        (lambda: alpha_of_totals(0, 0), "verified=0"),
        (lambda: alpha_of_rate(1.2, 4), "rate=1.2"),
        (lambda: expected_acceptance_rate(0.5, 0), "gamma=0"),
    ],
)
def test_values_outside_the_range_are_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidParameterError, match=message):
        call()


def test_intervals_of_shares_contain_the_share_in_spite_of_rounding() -> None:
    for trials in range(1, 60):
        for successes in (0, 1, trials - 1, trials):
            low, high = wilson(successes, trials)
            assert low <= successes / trials <= high
