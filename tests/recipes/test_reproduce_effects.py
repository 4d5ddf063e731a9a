"""Effects of recipes: error probabilities against enumeration, and the outcomes that follow."""

import itertools
import math

import pytest

from recipes.reproduce import effect
from recipes.reproduce.effect import Values
from recipes.reproduce.recipe import verdict_of


def values(*numbers: float, repeat: int = 0) -> Values:
    return {(repeat, index, 0): number for index, number in enumerate(numbers)}


@pytest.mark.parametrize("num", range(1, 9))
def test_the_sign_test_counts_the_sequences_of_coins_with_at_least_as_many_wins(num: int) -> None:
    heads = [sum(coins) for coins in itertools.product((0, 1), repeat=num)]
    for wins in range(num + 1):
        enumerated = sum(each >= wins for each in heads) / len(heads)
        assert effect.sign_test(wins, num - wins) == pytest.approx(enumerated, abs=1e-15)


def test_the_sign_test_without_differences_shows_nothing() -> None:
    assert effect.sign_test(0, 0) == 1.0


def test_the_error_probability_bounds_how_often_fair_coins_show_an_effect() -> None:
    """By enumeration of all outcomes of 12 fair coins, so without a false alarm."""
    shown = sum(
        math.comb(12, wins)
        for wins in range(13)
        if effect.sign_test(wins, 12 - wins) <= effect.ERROR
    )
    assert shown / 2**12 <= effect.ERROR


def test_a_greater_value_on_all_outputs_is_shown_and_its_reverse_is_reversed() -> None:
    large, small = values(*range(10, 20)), values(*range(10))
    found = effect.greater("large > small", large, small)
    assert (found.outcome, found.wins, found.losses) == ("shown", 10, 0)
    assert found.error == pytest.approx(2**-10)
    assert found.size == f"ratio {145 / 45:.3g}"
    assert effect.greater("small > large", small, large).outcome == "reversed"


def test_equal_outputs_leave_an_effect_undecided() -> None:
    same = values(1, 2, 3, 4, 5, 6)
    assert effect.greater("x", same, same).outcome == "undecided"


def test_only_outputs_of_both_cells_are_compared() -> None:
    found = effect.greater("x", values(2, 2, 2, 2, 2, 2), values(1, 1, 1, 1, 1))
    assert (found.wins, found.losses) == (5, 0)
    with pytest.raises(ValueError, match="no output is in both"):
        effect.greater("x", values(1), values(1, repeat=3))


def test_slopes_are_of_single_outputs() -> None:
    by_x = {x: values(*(10 * i + x for i in range(6))) for x in (0.0, 1.0, 3.0)}
    found = effect.rising("x", by_x)
    assert (found.wins, found.size, found.outcome) == (6, "slope 1", "shown")
    assert effect.falling("x", by_x).outcome == "reversed"


def test_a_mean_may_be_larger_though_most_outputs_are_smaller() -> None:
    a = values(*([1.0] * 12 + [30.0] * 8))
    b = values(*([2.0] * 20))
    assert effect.greater("a > b", a, b).outcome == "undecided"
    assert effect.greater_mean("a > b", a, b).outcome == "shown"


def test_other_prompts_are_compared_by_prompt_and_not_by_output() -> None:
    many = {(repeat, 0, 0): 1.0 for repeat in range(50)}
    one = {(repeat, 0, 0): 0.0 for repeat in range(50)}
    assert effect.exceeds("a prompt exceeds another", many, one).outcome == "undecided"
    found = effect.exceeds("x", values(*range(10, 20)), values(*range(10)))
    assert found.outcome == "shown"


def test_equality_is_rejected_only_where_the_sign_test_is_clear() -> None:
    near = effect.same("x", values(1, 2, 1, 2, 1, 2), values(2, 1, 2, 1, 2, 1))
    far = effect.same("x", values(*[1.0] * 20), values(*[0.0] * 20))
    assert (near.outcome, near.error) == ("shown", effect.FALSE_ALARM)
    assert far.outcome == "reversed"


def test_a_verdict_needs_every_effect() -> None:
    good = effect.greater("good", values(*range(10, 20)), values(*range(10)))
    weak = effect.greater("weak", values(1, 0), values(0, 1))
    assert verdict_of([good]) == ("reproduced in shape", "error probability at most 0.00098")
    assert verdict_of([good, weak]) == ("not reproduced", "weak: undecided, ratio 1 (0 to inf)")
    assert verdict_of([effect.certain("a", "", False)])[0] == "not reproduced"
