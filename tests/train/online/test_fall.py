"""The test of fallen acceptance: false alarms are rare, and falls are found.

Legend: R repetitions.
"""

import random

import pytest

from outrider.train.online.fall import FallTest

REFERENCE = 400


def first_alarm(reference: float, mean: float, num: int, seed: int, delta: float) -> int | None:
    """After how many values the alarm is raised, of a reference and values that are 0 or 1."""
    rng = random.Random(seed)
    draws = [float(rng.random() < reference) for _ in range(REFERENCE)]
    test = FallTest(draws, delta)
    for index in range(num):
        if test.add(float(rng.random() < mean)):
            return index + 1
    return None


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
def test_false_alarms_are_rarer_than_stated(mean: float) -> None:
    """δ = 0.05 in 300 runs of 1,000 values each, all of which are tested: at most 15 alarms are
    expected. 27 or more have a probability of 0.3 %."""
    alarms = [first_alarm(mean, mean, 1000, seed, 0.05) for seed in range(300)]
    assert sum(alarm is not None for alarm in alarms) < 27


def test_a_test_without_memory_of_how_often_it_was_asked_would_raise_more() -> None:
    """Asked after each value whether a fixed-size bound is exceeded, the same data raise the alarm
    far more often: the statement about all times is not empty."""
    alarms = 0
    for seed in range(300):
        rng = random.Random(seed)
        total, bad = 0.0, False
        for num in range(1, 1001):
            total += rng.random() < 0.5
            bad |= num > 10 and total / num < 0.5 - 1.645 * 0.5 / num**0.5
        alarms += bad
    assert alarms > 60


@pytest.mark.parametrize(("reference", "mean", "most"), [(0.7, 0.2, 60), (0.7, 0.45, 600)])
def test_falls_are_found(reference: float, mean: float, most: int) -> None:
    """Each of 40 falls is found within so many values; one is missed with less than 1e-3."""
    alarms = [first_alarm(reference, mean, most, seed, 0.01) for seed in range(40)]
    assert all(alarm is not None for alarm in alarms)


def test_a_rise_raises_no_alarm() -> None:
    assert all(first_alarm(0.4, 0.6, 2000, seed, 0.05) is None for seed in range(20))


@pytest.mark.parametrize("reference", [[], [0.0] * 50, [1.0] * 3])
def test_references_that_say_little(reference: list[float]) -> None:
    test = FallTest(reference, 0.01)
    assert 0 <= test.least <= 1
    for _ in range(200):
        test.add(1.0)
    assert not test.has_fallen


def test_a_reference_of_ones_and_values_of_one() -> None:
    test = FallTest([1.0] * 100_000, 0.5)
    assert not any(test.add(1.0) for _ in range(1000))
    assert any(test.add(0.0) for _ in range(1000))
