"""Arguments as users give them: numpy's and torch's numbers as Python's, checks of type and choice,
and how a value is shown in an error message.
"""

import math
from collections.abc import Iterable
from typing import Any

from outrider.core.errors import InvalidParameterError

_MOST_SHOWN = 80
_MOST_ID = 2**63


def as_python(value: object) -> Any:
    """A numpy scalar, or an array or tensor of no dimension, as Python's own number; anything else
    as it is."""
    single: Any = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return single.item()
    return single


def is_whole(value: object) -> bool:
    """Whether a value is an ``int``; truth values are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_id(value: object) -> bool:
    """Whether a value is an ``int`` that can number a token or a position."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_ID


def is_finite(value: object) -> bool:
    """Whether a value is an ``int`` or a ``float`` that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises InvalidParameterError, which names the argument, for what is none of the choices."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise InvalidParameterError(f"{name}={shown(value)}: must be one of {', '.join(choices)}")


def check_flag(name: str, value: object) -> None:
    """Raises InvalidParameterError, which names the argument, for what is no truth value."""
    if not isinstance(as_python(value), bool):
        raise InvalidParameterError(f"{name}={shown(value)}: must be True or False")


def shown(value: object) -> str:
    """A value in an error message: on one line, and not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an int of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
