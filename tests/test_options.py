"""Options of methods: types, defaults, and the errors for invalid values."""

import math
from typing import Literal

import pytest

from outrider import METHODS
from outrider.core.errors import InvalidParameterError
from outrider.options import Option, resolve


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        (float, "0.25", 0.25),
        (float, 1, 1.0),
        (float, "inf", math.inf),
        (int, "7", 7),
        (int, 7.0, 7),
        (bool, "yes", True),
        (bool, False, False),
        (str, "text", "text"),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_values_are_read(kind: object, value: object, parsed: object) -> None:
    found = Option("x", kind, None).parse(value)
    assert found == parsed
    assert type(found) is type(parsed)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, "much", "a number"),
        (float, True, "a number"),
        (float, [1], "a number"),
        (int, "2.5", "a whole number"),
        (int, 2.5, "a whole number"),
        (int, math.inf, "a whole number"),
        (bool, "maybe", "true or false"),
        (str, 3, "text"),
        (Literal["a", "b"], "c", "one of a, b"),
    ],
)
def test_invalid_values_are_errors(kind: object, value: object, expected: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        Option("x", kind, None).parse(value)
    assert str(error.value) == f"x={value!r}: must be {expected}"


def test_errors_for_unknown_names_suggest_the_nearest() -> None:
    options = {"budget": Option("budget", float, 0.1)}
    with pytest.raises(InvalidParameterError, match="no such option; did you mean 'budget'"):
        resolve("method 'm'", options, {"bugdet": 1})
    with pytest.raises(InvalidParameterError, match="method 'm' has no options"):
        resolve("method 'm'", {}, {"budget": 1})


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_valid_and_round_trip(name: str) -> None:
    """Defaults can be passed back as values, and as strings as `outrider methods` prints them."""
    method = METHODS[name]
    defaults = {option.name: option.default for option in method.options.values()}
    for values in (defaults, {name: str(value) for name, value in defaults.items()}):
        assert method.recipe(values).verifier == method.recipe().verifier
    assert method.lossless == method.recipe().verifier.bound.lossless
