"""Joules per token of a cell, also where a meter failed."""

from dataclasses import replace
from typing import Any

import pytest
from tiny_bench import repeat

from outrider.lab.bench import Repeat
from outrider.lab.energy.per_token import joules_per_token


def reading(number: int, tokens: int, **values: Any) -> Repeat:
    return replace(repeat(number, (1.0, tokens)), readings={"energy": values})


def test_joules_are_added_up_before_they_are_divided() -> None:
    found = joules_per_token(
        [
            reading(0, 10, joules=20.0, joules_above_idle=10.0, estimate=False),
            reading(1, 30, joules=40.0, joules_above_idle=20.0, estimate=False),
        ]
    )["energy"]
    assert (found.joules, found.above_idle) == (1.5, 0.75)
    assert not found.estimate
    assert found.errors == ()


def test_repeats_in_which_the_counter_vanished_count_in_neither() -> None:
    readings = [
        reading(0, 10, joules=20.0, joules_above_idle=None, estimate=False),
        reading(1, 30, joules=None, joules_above_idle=None, estimate=False, error="gone"),
    ]
    found = joules_per_token(readings)["energy"]
    assert found.joules == 2
    assert found.above_idle is None
    assert found.errors == ("gone",)
    assert joules_per_token(readings[1:])["energy"].joules is None


def test_an_estimate_is_marked() -> None:
    assert joules_per_token([reading(0, 2, joules=1, estimate=True)])["energy"].estimate


def test_other_meters_are_left_out() -> None:
    assert joules_per_token([reading(0, 2, temperature=50)]) == {}


@pytest.mark.parametrize("tokens", [0])
def test_a_cell_without_tokens_has_no_joules_per_token(tokens: int) -> None:
    assert joules_per_token([reading(0, tokens, joules=1.0)])["energy"].joules is None
