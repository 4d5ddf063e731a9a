"""Validation of user arguments: conversion of numpy and torch numbers to Python's, checks of type
and choice, and how a value is shown in an error message.
"""

import math
from collections.abc import Iterable
from typing import Any

from outrider.core.errors import InvalidParameterError, PromptError

_MAX_SHOWN = 80
_MAX_ID = 2**63


def as_python(value: object) -> Any:
    """A numpy scalar, or a zero-dimensional array or tensor, as a Python number; anything else
    unchanged."""
    single: Any = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return single.item()
    return single


def is_whole(value: object) -> bool:
    """Whether a value is an ``int`` and not a ``bool``."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_id(value: object) -> bool:
    """Whether a value is an ``int`` that can be a token id or a position."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_ID


def is_finite(value: object) -> bool:
    """Whether a value is an ``int`` or ``float`` with a finite floating-point value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises InvalidParameterError, naming the argument, unless the value is one of the choices."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise InvalidParameterError(f"{name}={shown(value)}: must be one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """Raises InvalidParameterError, naming the argument, unless the value is a ``bool``."""
    if not isinstance(as_python(value), bool):
        raise InvalidParameterError(f"{name}={shown(value)}: must be True or False")


def shown(value: object) -> str:
    """A value as error messages show it: on one line, shortened if necessary."""
    try:
        line = " ".join(repr(value).split())
    except ValueError:  # an int with more digits than Python is willing to print
        line = f"<{type(value).__name__}>"
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 1] + "…"


def check_string(string: str, what: str) -> None:
    """Raises PromptError for a string with a lone surrogate, which no tokenizer reads.

    Args:
        string: what to check.
        what: how the message calls it.
    """
    try:
        string.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{what} has a lone surrogate, {string[error.start]!r}, at character {error.start}, "
            f"which no encoding has: string.encode('utf-8', 'replace').decode() replaces it"
        ) from None
