"""Predicted against measured speed-up: factors of a run, and the division of a shortfall."""

import itertools
import math

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.prediction import (
    FACTORS,
    Factors,
    ideal,
    if_ideal,
    if_reference,
    measured_factors,
    published_factors,
    shortfall,
)
from outrider.lab.analysis.speedup import speedup

RUN = {
    "alpha": 0.7,
    "gamma": 5.0,
    "tokens": 3.1,
    "draft_seconds": 0.010,
    "target_seconds": 0.030,
    "other_seconds": 0.004,
    "plain_target_seconds": 0.020,
    "plain_other_seconds": 0.001,
}


def test_the_factors_reproduce_the_measured_speedup() -> None:
    found = measured_factors(**RUN)
    assert found.speedup == pytest.approx(3.1 * (0.020 + 0.001) / (0.010 + 0.030 + 0.004))
    assert found.tokens == pytest.approx(3.1)
    assert found.c == pytest.approx(0.1)
    assert found.beta == pytest.approx(1.5)
    assert found.predicted == pytest.approx(speedup(0.7, 5, 0.1, 1.5))


def test_overhead_that_plain_decoding_has_as_well_is_none() -> None:
    """If a round and a plain step spend the same share outside their passes, no overhead is
    left."""
    run = {**RUN, "other_seconds": 0.040 * 0.05, "plain_other_seconds": 0.020 * 0.05}
    assert measured_factors(**run).overhead == pytest.approx(0, abs=1e-12)


def test_the_ratios_multiply_to_the_whole() -> None:
    measured = measured_factors(**RUN)
    for reference in (None, Factors(0.8, 5, 1.05, 0.02, 1.1, 0.01), Factors(0.6, 3)):
        found = shortfall(measured, reference)
        whole = measured.speedup / found.reference.speedup
        assert math.prod(found.ratios.values()) == pytest.approx(whole)
        assert sum(map(found.share, FACTORS)) == pytest.approx(1)
    assert set(found.as_dict()["ratios"]) == set(FACTORS)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", 0.5), ("dependence", 0.9), ("c", 0.4), ("beta", 2.5), ("overhead", 0.8)],
)
def test_a_single_difference_is_blamed_alone(name: str, value: float) -> None:
    reference = Factors(0.8, 4, 1.0, 0.05, 1.1, 0.05)
    measured = Factors(**{**vars(reference), name: value})
    found = shortfall(measured, reference)
    assert found.largest == name
    assert found.ratios[name] == pytest.approx(measured.speedup / reference.speedup)
    assert found.share(name) == pytest.approx(1)
    assert all(found.ratios[each] == pytest.approx(1) for each in FACTORS if each != name)


def test_the_division_does_not_depend_on_an_order() -> None:
    """Against a direct sum over all orders of the three costs, which share a denominator."""
    measured, reference = Factors(1.0, 2, 1.0, 0.5, 3.0, 0.7), Factors(1.0, 2)
    parts = {
        "c": (0.0, 1.0),
        "beta": (1.0, 3.0),
        "overhead": (0.0, 0.7),
    }
    logs = dict.fromkeys(parts, 0.0)
    for order in itertools.permutations(parts):
        cost = {name: before for name, (before, _) in parts.items()}
        for name in order:
            before = sum(cost.values())
            cost[name] = parts[name][1]
            logs[name] -= math.log(sum(cost.values()) / before) / 6
    ratios = shortfall(measured, reference).ratios
    for name, log in logs.items():
        assert ratios[name] == pytest.approx(math.exp(log))


def test_nothing_is_blamed_where_nothing_falls_short() -> None:
    same = Factors(0.8, 4)
    assert shortfall(same, same).largest is None
    assert shortfall(same, same).share("alpha") == 0
    assert shortfall(Factors(0.9, 4), same).largest is None


def test_each_factor_made_ideal() -> None:
    measured = measured_factors(**RUN)
    found = if_ideal(measured)
    assert found["alpha"] == pytest.approx(6 / measured.cost)
    assert found["c"] == pytest.approx(3.1 / (measured.cost - 0.5))
    assert found["beta"] == pytest.approx(3.1 / (measured.cost - 0.5))
    assert found["overhead"] == pytest.approx(3.1 / 2.0)
    assert ideal(measured).speedup == 6
    cheap = Factors(0.5, 2, 1.0, 0.1, 0.8, -0.1)
    assert if_ideal(cheap)["beta"] == if_ideal(cheap)["overhead"] == cheap.speedup


@pytest.mark.parametrize("change", [{"gamma": 0.0}, {"plain_target_seconds": 0.0}])
def test_a_run_without_drafts_or_times_has_no_factors(change: dict[str, float]) -> None:
    with pytest.raises(InvalidParameterError, match="factors need gamma"):
        measured_factors(**{**RUN, **change})


def test_published_factors_have_the_printed_speedup() -> None:
    """Leviathan et al., table 2 and appendix: T5-small, γ 7, predicted as 3.2×, measured as
    3.4×."""
    found = published_factors(3.4, alpha=0.75, gamma=7, c=0.02)
    assert found.speedup == pytest.approx(3.4)
    assert found.predicted == pytest.approx(3.157, abs=1e-3)
    assert found.dependence == pytest.approx(3.4 / found.predicted)
    assert (found.beta, found.overhead) == (1.0, 0.0)
    with pytest.raises(InvalidParameterError, match="speedup=0"):
        published_factors(0, alpha=0.75, gamma=7, c=0.02)


def test_each_factor_of_the_reference_alone() -> None:
    measured = Factors(0.7, 4, 1.1, 0.2, 1.5, 0.3)
    reference = published_factors(3.4, alpha=0.75, gamma=7, c=0.02)
    found = if_reference(measured, reference)
    tokens = measured.tokens
    assert found["c"] == pytest.approx(tokens / (7 * 0.02 + 1.5 + 0.3))
    assert found["beta"] == pytest.approx(tokens / (4 * 0.2 + 1.0 + 0.3))
    assert found["overhead"] == pytest.approx(tokens / (4 * 0.2 + 1.5))
    expected = reference.tokens / reference.dependence
    assert found["alpha"] == pytest.approx(expected * 1.1 / measured.cost)
    share = reference.dependence / measured.dependence
    assert found["dependence"] == pytest.approx(measured.speedup * share)


def test_replacing_every_factor_in_any_order_restores_the_published_speedup() -> None:
    """Tokens are a product, costs a sum: replaced one by one, they end at the reference."""
    reference = published_factors(2.46, alpha=0.8, gamma=4, c=1.8 / 14.1)
    measured = Factors(0.6, 4, 0.9, 0.3, 1.7, 0.4)
    names = ("alpha", "dependence", "c", "beta", "overhead")
    for order in itertools.permutations(names):
        each = measured
        for name in order:
            each = Factors(**{**vars(each), name: getattr(reference, name)})
        assert each.speedup == pytest.approx(2.46)
    assert math.prod(shortfall(measured, reference).ratios.values()) == pytest.approx(
        measured.speedup / 2.46
    )


def test_an_overhead_below_the_references_cost_is_still_divided() -> None:
    """A plain step that spends most of its time outside its pass makes overhead + 1 negative."""
    measured = Factors(0.7, 2, 1.0, 0.2, 3.0, -2.4)
    found = shortfall(measured)
    assert math.prod(found.ratios.values()) == pytest.approx(
        measured.speedup / found.reference.speedup
    )
    assert found.ratios["overhead"] > 1 > found.ratios["beta"]
    assert min(if_reference(measured, found.reference).values()) > 0
