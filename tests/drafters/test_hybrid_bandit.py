"""The bandit: expected speed-up, learning, shared estimates, and bad arguments."""

import pytest

from outrider.core import Context
from outrider.core.errors import InvalidParameterError
from outrider.drafters.sources.bandit import PRIOR, Bandit, Odds, speedup
from outrider.drafters.sources.sources import NO_SOURCE
from outrider.testing import SoftmaxDistribution

COPY, MODEL = 0, 1
LENGTHS = [8, 4]


def started(bandit: Bandit, rows: int = 1) -> list[Odds]:
    context = Context.start(
        [[row] for row in range(rows)], SoftmaxDistribution(), [0] * rows, range(rows)
    )
    return bandit.start(context)


def test_speedup_is_that_of_leviathan_et_al() -> None:
    for a, γ, c in ((0.5, 3, 0.1), (0.9, 7, 0.0), (0.0, 5, 0.2)):
        assert speedup(a, γ, c) == pytest.approx((1 - a ** (γ + 1)) / ((1 - a) * (γ * c + 1)))
    assert speedup(1.0, 4, 0.0) == 5
    assert speedup(0.7, 0, 0.3) == 1


def test_it_picks_the_source_with_the_largest_gain() -> None:
    bandit = Bandit([0.0, 0.2])
    (odds,) = started(bandit)
    assert bandit.pick(odds, LENGTHS) == COPY
    assert bandit.pick(odds, [0, 4]) == MODEL
    assert bandit.pick(odds, [0, 0]) == NO_SOURCE
    for _ in range(20):
        bandit.learn(odds, [(0, 1), (3, 4)])
    assert bandit.pick(odds, LENGTHS) == MODEL
    for _ in range(20):
        bandit.learn(odds, [(0, 1), (0, 1)])
    assert bandit.pick(odds, [0, 4]) == NO_SOURCE


def test_a_source_that_was_not_picked_is_tried_again() -> None:
    """Its estimate decays towards the optimistic prior."""
    bandit = Bandit([0.0, 0.2], 0.8)
    (odds,) = started(bandit)
    for _ in range(10):
        bandit.learn(odds, [(0, 1), (0, 1)])
    assert bandit.acceptance(odds, MODEL) < 0.5 * PRIOR
    for _ in range(40):
        bandit.learn(odds, [(0, 1), (0, 0)])
    assert bandit.acceptance(odds, MODEL) == pytest.approx(PRIOR, rel=1e-3)
    assert bandit.pick(odds, LENGTHS) == MODEL


def test_a_change_is_learnt_sooner_with_a_small_discount() -> None:
    rounds = []
    for discount in (0.8, 0.95):
        bandit = Bandit([0.0, 0.2], discount)
        (odds,) = started(bandit)
        for _ in range(30):
            bandit.learn(odds, [(8, 8), (0, 0)])
        waited = 0
        while bandit.pick(odds, LENGTHS) == COPY and waited < 200:
            bandit.learn(odds, [(0, 1), (0, 0)])
            waited += 1
        rounds.append(waited)
    assert 0 < rounds[0] < rounds[1] < 200


def test_requests_learn_by_themselves_or_by_class() -> None:
    alone = started(Bandit([0.0, 0.2]), 3)
    assert len({id(odds) for odds in alone}) == 3
    bandit = Bandit([0.0, 0.2], classify=lambda context, row: row % 2)
    first, second, third = started(bandit, 3)
    assert first is third
    assert first is not second
    bandit.learn(first, [(5, 5), (0, 0)])
    assert started(bandit)[0].accepted == [5.0, 0.0]  # a later request of the class knows it


def test_one_source_is_an_error() -> None:
    for costs in ([0.2], []):
        with pytest.raises(InvalidParameterError, match=f"{len(costs)} source.*two or more"):
            Bandit(costs)
    for discount in (0.0, 1.5):
        with pytest.raises(InvalidParameterError, match=f"discount={discount}"):
            Bandit([0.0, 0.2], discount)
