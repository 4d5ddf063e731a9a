"""The simulated fleet against closed forms.

Every comparison of a mean number of requests allows five standard deviations of its time average,
so that it fails by chance with a probability below 1e-6. For M/M/1 the variance of the time
average over T seconds is 2 ρ (1 + ρ) / (μ (1 - ρ)^4 T); replicas are independent, so their times
add up (Whitt, "Planning queueing simulations", Management Science 1989).
"""

import math
from typing import Any

import numpy as np
import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.plan import Fleet, MeasuredPasses, Replica, Traffic, Workload, simulate
from outrider.lab.plan.simulate import _Simulation
from outrider.lab.plan.simulated import Histogram

R, SECONDS = 300, 2000.0


def run(fleet: Fleet, load: float, **settings: Any) -> Any:
    """Requests of one second alone on a replica whose row runs at one token per second."""
    lengths = settings.pop("lengths", "exponential")
    traffic = Traffic(load * fleet.replicas, 1.0, lengths=lengths)
    values: dict[str, Any] = {"seconds": SECONDS, "warmup": 200.0, "window": 40.0, "seed": 7}
    return simulate(fleet, traffic, **(values | settings))


def deviation(rho: float) -> float:
    """Of the time average of the number in an M/M/1 queue."""
    return math.sqrt(2 * rho * (1 + rho) / (1 - rho) ** 4 / (R * SECONDS))


def number(found: Any) -> float:
    return float(found.row_seconds + found.waiting_seconds) / found.seconds / R


def test_one_row_is_mm1() -> None:
    rho = 0.5
    found = run(Fleet(R, [1.0], routing="random"), rho)
    assert number(found) == pytest.approx(rho / (1 - rho), abs=5 * deviation(rho))
    assert found.busy_seconds / found.seconds / R == pytest.approx(rho, abs=0.01)
    assert found.wait.mean == pytest.approx(rho / (1 - rho), rel=0.05)
    assert found.wait.quantile(0.99) > found.wait.quantile(0.9) > 0


def test_constant_lengths_are_md1() -> None:
    """The mean wait of M/D/1 is half that of M/M/1 (Pollaczek and Khinchine)."""
    rho = 0.5
    found = run(Fleet(R, [1.0], routing="random"), rho, lengths="constant")
    assert found.wait.mean == pytest.approx(rho / (2 * (1 - rho)), rel=0.05)
    assert found.request.mean == pytest.approx(found.wait.mean + 1, rel=0.01)


@pytest.mark.parametrize("lengths", ["exponential", "constant"])
def test_shared_processors_do_not_depend_on_the_lengths(lengths: str) -> None:
    """Rows that slow each other in proportion: the mean number is that of M/M/1 for any
    distribution of lengths, and constant ones vary less."""
    rho = 0.5
    fleet = Fleet(R, [1 / n for n in range(1, 41)], routing="random")
    found = run(fleet, rho, lengths=lengths)
    assert number(found) == pytest.approx(rho / (1 - rho), abs=5 * deviation(rho))
    assert found.waiting_seconds == found.wait.quantile(0.99) == 0


def test_rows_that_do_not_slow_each_other_take_their_own_time() -> None:
    found = run(Fleet(R, [1.0] * 40, routing="random"), 3.0, lengths="constant", seconds=500.0)
    assert found.request.mean == pytest.approx(1, rel=1e-9)
    assert found.per_token.mean == pytest.approx(1, rel=1e-9)
    assert number(found) == pytest.approx(3, rel=0.02)


def test_number_is_rate_times_time() -> None:
    """Little (1961): the time integral of the number of requests is the sum of their times, up to
    those that were there at the ends."""
    fleet = Fleet(R, [1.0, 0.8, 0.6], prefill_seconds=0.2, queue=1000)
    found = run(fleet, 0.7, seconds=800.0)
    integral = found.row_seconds + found.waiting_seconds
    assert integral == pytest.approx(found.request.total, rel=0.01)
    assert found.finished == pytest.approx(found.arrived, rel=0.01)
    assert found.tokens == pytest.approx(found.finished, rel=0.02)


def test_the_birth_and_death_chain_of_the_planner() -> None:
    """Prefill aside, the plan's numbers of running and waiting requests are exact."""
    passes = MeasuredPasses({1: 0.01, 2: 0.015, 8: 0.04}), MeasuredPasses({1: 0.001, 8: 0.002})
    replica = Replica(*passes, 0.7, Workload(1.0, 1, 100), 4, 3)
    fleet = Fleet(R, replica.row_rates, routing="random", queue=1000)
    load = 0.7 / (100 / (4 * replica.row_rates[-1]))
    traffic = Traffic(load * R, 100.0)
    found = simulate(fleet, traffic, SECONDS, warmup=200, window=20, seed=3)

    def exact(rates: list[float]) -> tuple[float, float]:
        weights = [1.0]
        for n in range(1, 200):
            weights.append(weights[-1] * load / rates[min(n, 4) - 1])
        total = sum(weights)
        return (
            sum(min(n, 4) * w for n, w in enumerate(weights)) / total,
            sum(max(0, n - 4) * w for n, w in enumerate(weights)) / total,
        )

    rows, waiting = exact([n * replica.row_rates[n - 1] / 100 for n in range(1, 5)])
    assert found.row_seconds / SECONDS / R == pytest.approx(rows, rel=0.02)
    assert found.waiting_seconds / SECONDS / R == pytest.approx(waiting, rel=0.06)


def test_the_speedup_is_that_of_the_formula() -> None:
    """A saturated replica of one row emits E / (γ d + t) tokens per second with drafts."""
    passes = MeasuredPasses({1: 1.0, 4: 1.3}), MeasuredPasses({1: 0.1})
    rates = {}
    for gamma in (0, 3):
        replica = Replica(*passes, 0.8, Workload(1.0, 1, 50), 1, max_gamma=gamma)
        assert replica.gammas == (gamma,)
        fleet = Fleet(20, replica.row_rates, queue=10)
        found = simulate(fleet, Traffic(1.5, 50.0), 4000, warmup=500, window=100)
        assert found.rejected > 0
        assert found.busy_seconds == pytest.approx(20 * 4000, rel=1e-3)
        rates[gamma] = found.tokens / found.seconds
    assert rates[3] / rates[0] == pytest.approx(expected_tokens(0.8, 3) / (0.3 + 1.3), rel=0.03)


def test_prefill_interrupts_all_rows() -> None:
    """Two rows at most; the second's prefill delays the first's end by its whole length."""
    fleet = Fleet(1, [1.0, 1.0], prefill_seconds=0.5)
    traffic = Traffic(0.5, 10.0, lengths="constant")
    found = simulate(fleet, traffic, 40.0, seed=2, window=40.0)
    assert found.finished > 0
    assert found.request.mean > 10.5
    assert found.first_token.mean >= 0.5


def test_failures_lose_nothing() -> None:
    """Whatever arrived has finished, was rejected, runs, waits, or is about to arrive again."""
    fleet = Fleet(20, [1.0, 0.9], mean_time_to_failure=50.0, repair_seconds=5.0, queue=3)
    simulation = _Simulation(fleet, Traffic(20.0, 1.0), seed=1)
    found = simulation.run(400.0, 0.0, 1.0, lambda seconds: None)
    there = simulation.rows_R.sum() + simulation.waiting_R.sum() + sum(map(len, simulation.again))
    assert found.arrived == found.finished + found.rejected + there
    assert found.failures == pytest.approx(20 * 400 / 55, rel=0.4)
    assert found.restarted > 0
    calm = simulate(Fleet(20, [1.0, 0.9], queue=3), Traffic(20.0, 1.0), 400.0, seed=1)
    assert calm.failures == calm.restarted == 0
    assert calm.request.mean < found.request.mean


def test_requests_wait_while_no_replica_serves() -> None:
    fleet = Fleet(1, [1.0] * 50, mean_time_to_failure=20.0, repair_seconds=20.0)
    found = simulate(fleet, Traffic(1.0, 1.0, "constant"), 2000.0, seed=4)
    assert found.rejected == 0
    assert found.busy_seconds < 0.75 * 2000
    assert found.request.quantile(0.99) > 15
    assert found.finished > 0.9 * found.arrived


def test_two_choices_wait_less_than_one() -> None:
    times = {
        routing: run(Fleet(R, [1.0], routing=routing), 0.8, window=0.2, seconds=100.0).wait.mean
        for routing in ("random", "two choices")
    }
    assert times["two choices"] < 0.7 * times["random"]


def test_the_load_follows_the_day() -> None:
    traffic = Traffic(2.0, 1.0, swing=0.5, peak=14.0)
    assert traffic.at(14 * 3600) == pytest.approx(3.0)
    assert traffic.at(2 * 3600) == pytest.approx(1.0)
    calm = Traffic(0.2, 1.0, swing=0.5)
    hours: list[float] = []
    found = simulate(Fleet(1, [1.0] * 20), calm, 86400.0, window=600.0, progress=hours.append)
    assert hours == [3600.0 * hour for hour in range(1, 25)]
    loads = [each["load"] for each in found.hours]
    assert len(loads) == 24
    assert np.argmax(loads) in range(10, 18)
    assert sum(loads) / 24 == pytest.approx(0.2, rel=0.05)


def test_a_seed_fixes_everything() -> None:
    fleet = Fleet(3, [1.0, 0.7], mean_time_to_failure=30.0, repair_seconds=3.0)
    first, again, other = (
        simulate(fleet, Traffic(2.0, 1.0), 50.0, seed=seed).as_dict() for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_quantiles_of_the_histogram_are_within_one_percent() -> None:
    values = np.random.default_rng(0).exponential(1.0, 100_000)
    histogram = Histogram()
    histogram.add(values)
    for share in (0.1, 0.5, 0.99):
        assert histogram.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.011)
    assert histogram.mean == pytest.approx(values.mean())
    assert math.isnan(Histogram().mean)
    assert math.isnan(Histogram().quantile(0.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"row_rates": []}, "row_rates"),
        ({"row_rates": [0.0]}, "row_rates"),
        ({"queue": -1}, "queue=-1"),
        ({"mean_time_to_failure": 0.0}, "mean_time_to_failure"),
        ({"round_seconds": [1.0, 2.0]}, "round_seconds"),
    ],
)
def test_fleets_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        Fleet(**({"replicas": 1, "row_rates": [1.0]} | values))


def test_traffic_and_times_that_cannot_be() -> None:
    with pytest.raises(InvalidParameterError, match="swing=2"):
        Traffic(1.0, 1.0, swing=2)
    with pytest.raises(InvalidParameterError, match="load=0"):
        Traffic(0, 1.0)
    with pytest.raises(InvalidParameterError, match="seconds=0"):
        simulate(Fleet(1, [1.0]), Traffic(1.0, 1.0), 0)
