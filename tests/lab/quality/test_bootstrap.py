"""The paired bootstrap: coverage of its interval, power of pairing, and exact small cases."""

import math
import statistics

import numpy as np
import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.quality.bootstrap import paired_bootstrap


def test_the_interval_covers_the_true_difference() -> None:
    """300 data sets of 60 prompts with a true difference of 0.3: the number of 90 % intervals that
    cover it is binomial. The percentile interval covers about 0.89 at this size; a false alarm,
    fewer than 240 or more than 290, has probability below 1e-5. An unpaired resampling covers all.
    """
    generator = np.random.Generator(np.random.PCG64(1))
    covered = 0
    for data_set in range(300):
        prompt = generator.normal(0, 3, 60)
        a = (prompt + 0.3 + generator.normal(0, 1, 60)).tolist()
        b = (prompt + generator.normal(0, 1, 60)).tolist()
        found = paired_bootstrap(a, b, num_resamples=200, confidence=0.9, seed=data_set)
        covered += found.low <= 0.3 <= found.high
    assert 240 <= covered <= 290


def test_prompts_that_are_hard_for_both_do_not_matter() -> None:
    """A difference of 1 ± 0.1 per prompt shows among prompts that vary by 100; the probability that
    a resample of 50 contradicts it is below 1e-100."""
    generator = np.random.Generator(np.random.PCG64(2))
    prompt = generator.normal(0, 100, 50)
    a, b = (prompt + 1 + generator.normal(0, 0.1, 50)).tolist(), prompt.tolist()
    found = paired_bootstrap(a, b)
    assert found.value == pytest.approx(1, abs=0.1)
    assert found.is_significant
    assert found.probability == 1
    assert found.high - found.low < 0.1


def test_equal_methods_do_not_differ() -> None:
    found = paired_bootstrap([1.0, 2.0, 5.0], [1.0, 2.0, 5.0])
    assert (found.value, found.low, found.high, found.probability) == (0, 0, 0, 0.5)
    assert not found.is_significant


def test_the_interval_of_two_prompts_by_hand() -> None:
    """The mean of two differences, 0 and 1, is 0, 1/2 or 1 with probabilities 1/4, 1/2, 1/4; of
    20,000 resamples the share of each is within 0.02 but with probability below 1e-7."""
    found = paired_bootstrap([1.0, 1.0], [1.0, 0.0], num_resamples=20_000, confidence=0.9)
    assert (found.value, found.low, found.high) == (0.5, 0, 1)
    assert found.probability == pytest.approx(3 / 4 + 1 / 8, abs=0.02)


def test_any_statistic() -> None:
    """A ratio of sums, as of a metric of a corpus; items are what it reads."""

    def share(items: object) -> float:
        pairs: list[tuple[int, int]] = list(items)  # type: ignore[call-overload]
        return sum(hits for hits, _ in pairs) / sum(total for _, total in pairs)

    a, b = [(9, 10), (1, 1), (40, 50)], [(5, 10), (0, 1), (20, 50)]
    found = paired_bootstrap(a, b, share)
    assert found.a == pytest.approx(50 / 61)
    assert found.b == pytest.approx(25 / 61)
    assert found.low > 0


def test_resamples_are_those_of_the_seed() -> None:
    a, b = [0.1, 0.5, 0.9, 0.3], [0.2, 0.1, 0.8, 0.4]
    assert paired_bootstrap(a, b, seed=3) == paired_bootstrap(a, b, seed=3)
    others = {paired_bootstrap(a, b, seed=seed).probability for seed in range(3, 8)}
    assert len(others) > 1


def test_medians_may_be_compared() -> None:
    found = paired_bootstrap([1.0, 2.0, 9.0], [0.0, 1.0, 2.0], statistics.median)
    assert found.value == 1
    assert math.isfinite(found.low)


def test_bad_input() -> None:
    with pytest.raises(InvalidParameterError, match="3 and 2 prompts"):
        paired_bootstrap([1.0, 2.0, 3.0], [1.0, 2.0])
    with pytest.raises(InvalidParameterError, match="at least one"):
        paired_bootstrap([], [])
    with pytest.raises(InvalidParameterError, match="num_resamples"):
        paired_bootstrap([1.0], [1.0], num_resamples=0)
    with pytest.raises(InvalidParameterError, match="confidence"):
        paired_bootstrap([1.0], [1.0], confidence=1.0)
