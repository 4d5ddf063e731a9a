"""Checks of the arguments of formulas."""

import math

from outrider.core.errors import InvalidParameterError


def check_probability(name: str, value: float) -> None:
    """Raises InvalidParameterError unless the value is a number from 0 to 1."""
    if not 0 <= value <= 1:
        raise InvalidParameterError(f"{name}={value!r}: must be a probability, from 0 to 1")


def check_at_least(name: str, value: float, least: float) -> None:
    """Raises InvalidParameterError unless the value is finite and at least ``least``."""
    if not (math.isfinite(value) and value >= least):
        raise InvalidParameterError(f"{name}={value!r}: must be a finite number, {least:g} or more")


def check_count(name: str, value: int, least: int) -> None:
    """Raises InvalidParameterError unless the value is a whole number, at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidParameterError(f"{name}={value!r}: must be a whole number, {least} or more")
