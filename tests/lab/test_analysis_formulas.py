"""Formulas of speed and acceptance against enumeration, simulation and published numbers."""

import itertools
import math
import random

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.drafters.sources import bandit
from outrider.lab.analysis.block_tokens import block_tokens, chain_tokens
from outrider.lab.analysis.experts import experts_beta, experts_touched
from outrider.lab.analysis.pass_times import (
    beta_at,
    interpolated,
    largest_batch,
    speedup_at_batch,
)
from outrider.lab.analysis.speedup import (
    alpha_for_speedup,
    alpha_of_tokens,
    is_worthwhile,
    largest_beta,
    largest_c,
    operations_factor,
    optimal_gamma,
    round_cost,
    seconds_per_token,
    speedup,
    tokens_of_latency,
)
from outrider.lab.analysis.tokens_per_round import (
    expected_tokens,
    expected_tokens_by_position,
    expected_tokens_of_mixture,
    rounds_of_generation,
    token_probabilities,
    token_variance,
)

ALPHAS = (0.0, 0.1, 0.5, 0.8, 0.97, 1.0)
GAMMAS = (0, 1, 2, 5, 9)
GRID = list(itertools.product(ALPHAS, GAMMAS))


def enumerated(alpha: float, gamma: int) -> list[float]:
    """P(X = 1) … P(X = γ + 1) by enumeration of all outcomes of γ independent acceptances."""
    probabilities = [0.0] * (gamma + 1)
    for outcome in itertools.product((True, False), repeat=gamma):
        weight = math.prod(alpha if accepted else 1 - alpha for accepted in outcome)
        probabilities[outcome.index(False) if False in outcome else gamma] += weight
    return probabilities


@pytest.mark.parametrize(("alpha", "gamma"), GRID)
def test_distribution_mean_and_variance_are_those_of_all_outcomes(alpha: float, gamma: int) -> None:
    exact = enumerated(alpha, gamma)
    assert token_probabilities(alpha, gamma) == pytest.approx(exact, abs=1e-12)
    mean = sum(x * p for x, p in enumerate(exact, 1))
    square = sum(x * x * p for x, p in enumerate(exact, 1))
    assert expected_tokens(alpha, gamma) == pytest.approx(mean, rel=1e-12)
    assert token_variance(alpha, gamma) == pytest.approx(square - mean**2, abs=1e-12)


def test_expected_tokens_are_exact_near_one() -> None:
    """The printed quotient loses half of the digits there."""
    alpha = 1 - 1e-9
    exact = math.fsum(alpha**n for n in range(6))
    assert expected_tokens(alpha, 5) == pytest.approx(exact, rel=1e-15)


def test_tokens_by_position_allow_dependence() -> None:
    assert expected_tokens_by_position([]) == 1
    assert expected_tokens_by_position([0.5, 1.0, 0.25]) == 1 + 0.5 + 0.5 + 0.125
    assert expected_tokens_by_position([0.7] * 5) == pytest.approx(expected_tokens(0.7, 5))


def test_a_mixture_emits_more_tokens_than_its_mean() -> None:
    """Beta(1.4, 0.6) has mean 0.7. Compared with an integral over α by the midpoint rule."""
    steps, total, weight = 200_000, 0.0, 0.0
    for i in range(steps):
        alpha = ((i + 0.5) / steps) ** 2  # substituted, so that the density has no pole at 1
        alpha = 1 - alpha
        density = alpha**0.4 * (1 - alpha) ** (-0.4) * (i + 0.5) / steps
        weight += density
        total += density * expected_tokens(alpha, 5)
    exact = expected_tokens_of_mixture(1.4, 0.6, 5)
    assert exact == pytest.approx(total / weight, rel=1e-4)
    assert round(exact, 2) == 3.53
    assert round(expected_tokens(0.7, 5), 2) == 2.94
    assert expected_tokens_of_mixture(7e8, 3e8, 5) == pytest.approx(expected_tokens(0.7, 5))


def test_rounds_of_a_generation_are_those_of_all_outcomes() -> None:
    """Enumerates every sequence of rounds that emits five tokens."""

    def outcomes(left: int, rounds: int, weight: float) -> list[tuple[int, float]]:
        if left <= 0:
            return [(rounds, weight)]
        return [
            each
            for x, p in enumerate(token_probabilities(0.6, 3), 1)
            for each in outcomes(left - x, rounds + 1, weight * p)
        ]

    found = outcomes(5, 0, 1.0)
    mean = sum(n * w for n, w in found)
    variance = sum(n * n * w for n, w in found) - mean**2
    assert rounds_of_generation(0.6, 3, 5) == pytest.approx((mean, variance), rel=1e-12)
    assert rounds_of_generation(0.6, 0, 7) == (7, 0)


def test_the_time_of_whole_generations_varies_more_with_longer_drafts() -> None:
    """The shape of Chen et al.'s figure 1, with their 14.1 ms and 1.8 ms and 128 tokens."""
    deviations = []
    for gamma in range(8):
        _, variance = rounds_of_generation(0.6, gamma, 128)
        deviations.append((14.1 + 1.8 * gamma) * math.sqrt(variance))
    assert deviations[0] == 0
    assert deviations == sorted(deviations)


@pytest.mark.parametrize(("alpha", "gamma"), GRID)
def test_speedup_is_the_ratio_of_simulated_times(alpha: float, gamma: int) -> None:
    """Tokens over time, from the enumerated rounds."""
    c, beta = 0.15, 1.3
    mean = sum(x * p for x, p in enumerate(enumerated(alpha, gamma), 1))
    expected = mean / (gamma * c + beta)
    assert speedup(alpha, gamma, c, beta) == pytest.approx(expected, rel=1e-12)
    assert seconds_per_token(alpha, gamma, c, 0.02, beta) == pytest.approx(0.02 / expected)
    assert operations_factor(alpha, gamma, c) == pytest.approx((gamma * c + gamma + 1) / mean)
    assert bandit.speedup(alpha, gamma, c) == pytest.approx(speedup(alpha, gamma, c))


def test_limits() -> None:
    assert speedup(1.0, 7, 0.0) == 8
    assert operations_factor(0.0, 7, 0.0) == 8
    assert operations_factor(1.0, 7, 0.0) == 1
    assert round_cost(0, 0.5) == 1


@pytest.mark.parametrize(
    ("c", "gammas"),
    [
        (0.01, [5, 7, 9, 14, 24]),
        (0.05, [3, 4, 6, 8, 13]),
        (0.1, [2, 3, 4, 6, 10]),
        (0.2, [1, 2, 3, 4, 7]),
    ],
)
def test_optimal_draft_lengths(c: float, gammas: list[int]) -> None:
    """For α from 0.5 to 0.9 and β = 1, found independently by exhaustive search."""
    assert [optimal_gamma(alpha, c) for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)] == gammas


def test_optimal_draft_length_with_a_dear_verification() -> None:
    assert optimal_gamma(0.8, 0.05, lambda tokens: 1.0) == optimal_gamma(0.8, 0.05)
    assert optimal_gamma(0.8, 0.05, lambda tokens: float(tokens)) == 0
    steps = optimal_gamma(0.8, 0.05, lambda tokens: 1.0 if tokens <= 4 else 3.0)
    assert steps == 3
    assert optimal_gamma(0.3, 0.0, most=9) == 9


def test_some_draft_length_pays_iff_one_token_pays_iff_alpha_exceeds_c() -> None:
    for alpha, c in itertools.product((0.05, 0.3, 0.6, 0.95), (0.0, 0.1, 0.3, 0.7, 1.2)):
        any_pays = any(speedup(alpha, gamma, c) > 1 for gamma in range(1, 40))
        assert is_worthwhile(alpha, c) == any_pays == (speedup(alpha, 1, c) > 1)
        assert speedup(alpha, 1, c) == pytest.approx((1 + alpha) / (1 + c))


def test_inverse_problems_invert() -> None:
    for alpha, gamma in itertools.product((0.05, 0.5, 0.93), (1, 4, 11)):
        beta = largest_beta(alpha, gamma, 0.02)
        assert speedup(alpha, gamma, 0.02, beta) == pytest.approx(1)
        c = largest_c(alpha, gamma, 1.1)
        if c >= 0:
            assert speedup(alpha, gamma, c, 1.1) == pytest.approx(1)
        assert alpha_of_tokens(expected_tokens(alpha, gamma), gamma) == pytest.approx(alpha)
        assert alpha_of_tokens(1.0, gamma) == 0  # a free draft pays from the first token on
        reached = speedup(alpha, gamma, 0.1, 1.2)
        if reached > 1 / 1.2:
            found = alpha_for_speedup(reached, gamma, 0.1, 1.2)
            assert found == pytest.approx(alpha)
    assert alpha_for_speedup(9.0, 4, 0.1) is None
    assert alpha_for_speedup(0.1, 4, 0.0) == pytest.approx(0, abs=1e-20)
    assert largest_beta(2 / 3, 5, 0.01) == pytest.approx(2.687, abs=1e-3)  # the survey's 2.69


def test_times_are_interpolated_between_measured_sizes() -> None:
    times = {1: 1.0, 4: 1.6, 8: 4.0}
    assert [interpolated(times, n) for n in (1, 4, 8)] == [1.0, 1.6, 4.0]
    assert interpolated(times, 3) == pytest.approx(1.4)
    assert interpolated(times, 5) == pytest.approx(2.2)
    assert interpolated(times, 10) == pytest.approx(5.2)
    assert interpolated({1: 2.0}, 9) == 2.0


def test_the_batch_at_which_speculation_stops_paying() -> None:
    """Passes of a roofline: bound by memory up to 32 tokens, by arithmetic beyond."""

    def target(tokens: int) -> float:
        return max(32.0, tokens)

    def draft(tokens: int) -> float:
        return target(tokens) / 50

    assert beta_at(target, 3, 8) == 1
    assert beta_at(target, 3, 16) == 2
    assert beta_at(target, 3, 64) == 4
    assert speedup_at_batch(0.7, 3, target, draft) == pytest.approx(speedup(0.7, 3, 0.02))
    limit = largest_batch(0.7, range(1, 6), target, draft, 256)
    assert 8 < limit < 32
    assert all(speedup_at_batch(0.7, g, target, draft, limit + 1) <= 1 for g in range(1, 6))
    assert any(speedup_at_batch(0.7, g, target, draft, limit) > 1 for g in range(1, 6))
    assert largest_batch(0.01, [4], target, draft, 8) == 0
    assert largest_batch(0.9, [4], target, draft, 2) == 2


def test_experts_touched_are_those_of_simulated_routing() -> None:
    """20,000 draws; the standard error is below 0.01, so 0.05 is a false alarm below 1e-6."""
    generator = random.Random(0)
    counts = [
        len({e for _ in range(6) for e in generator.sample(range(8), 2)}) for _ in range(20_000)
    ]
    assert sum(counts) / len(counts) == pytest.approx(experts_touched(8, 2, 6), abs=0.05)
    assert experts_touched(8, 2, 1) == 2
    assert experts_touched(8, 2, 0) == 0
    assert experts_beta(8, 2, 0) == 1
    assert experts_beta(4, 4, 9) == 1


def brute_block(p: list[float], q: list[float], gamma: int) -> float:
    """E[X] of block verification by enumeration: of all drafts, and for each of the acceptance
    probabilities h of the algorithm itself (the longest i with u_i < h_i is accepted)."""
    total = 0.0
    for draft in itertools.product(range(len(q)), repeat=gamma):
        weight = math.prod(q[x] for x in draft)
        if weight == 0:
            continue
        reached, h = 1.0, []
        for i, x in enumerate(draft, 1):
            reached = min(1.0, reached * p[x] / q[x])
            if i == gamma:
                h.append(reached)
                continue
            mass = sum(max(reached * a - b, 0.0) for a, b in zip(p, q, strict=True))
            h.append(mass / (mass + 1 - reached) if mass + 1 - reached else 1.0)
        none_longer = 1.0
        for i in range(gamma, 0, -1):
            total += weight * i * none_longer * h[i - 1]
            none_longer *= 1 - h[i - 1]
    return 1 + total


def test_block_verification_against_the_algorithm() -> None:
    p, q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
    assert block_tokens(p, q, 2) - 1 == pytest.approx(11 / 9)
    assert chain_tokens(p, q, 2) - 1 == pytest.approx(10 / 9)
    generator = random.Random(1)
    for _ in range(20):
        size = generator.randint(2, 4)
        raw = [[generator.random() for _ in range(size)] for _ in range(2)]
        p, q = ([x / sum(each) for x in each] for each in raw)
        for gamma in (1, 2, 4):
            exact = brute_block(p, q, gamma)
            assert block_tokens(p, q, gamma) == pytest.approx(exact, abs=1e-9)
            assert exact >= chain_tokens(p, q, gamma) - 1e-12
        assert block_tokens(p, q, 1) == pytest.approx(chain_tokens(p, q, 1))


def test_chen_et_al_tokens_per_loop() -> None:
    loop = 14.1 + 4 * 1.8
    found = [round(tokens_of_latency(ms, loop), 2) for ms in (7.52, 7.00, 5.73)]
    assert found == [2.83, 3.04, 3.72]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.5, 4), "alpha=1.5: must be a probability"),
        (lambda: expected_tokens(math.nan, 4), "alpha=nan"),
        (lambda: expected_tokens(0.5, -1), "gamma=-1: must be a finite number, 0 or more"),
        (lambda: speedup(0.5, 4, -0.1), "c=-0.1"),
        (lambda: speedup(0.5, 4, 0.1, 0.0), "beta=0.0: must be above 0"),
        (lambda: optimal_gamma(0.5, 0.1, most=0), "most=0: must be a whole number, 1 or more"),
        (lambda: largest_c(0.5, 0), "gamma=0"),
        (lambda: alpha_of_tokens(9, 4), "tokens=9: must be from 1 to gamma"),
        (lambda: tokens_of_latency(0.0, 1.0), "seconds_per_token=0.0"),
        (lambda: experts_touched(8, 9, 1), "per_token=9: must be at most the 8 experts"),
        (lambda: block_tokens([0.5, 0.5], [1.0], 2), "as many in p as in q"),
        (lambda: largest_batch(0.5, [], lambda n: 1.0, lambda n: 1.0, 4), "at least one"),
        (lambda: rounds_of_generation(0.5, 2, 0), "tokens=0"),
    ],
)
def test_values_outside_the_range_are_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidParameterError, match=message):
        call()
