"""Options of a method: the parameters of its rule and drafter by name, given as values or text."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from outrider.core.errors import InvalidParameterError
from outrider.core.values import as_python, shown


@dataclass(frozen=True)
class Option:
    """A parameter that users may set.

    Attributes:
        name: the name that users write.
        type: ``float``, ``int``, ``bool``, ``str``, a ``Literal`` of strings, or a class with a
            classmethod ``parse`` that reads a text.
        default: the value if it is not set.
    """

    name: str
    type: Any
    default: object

    @property
    def plain(self) -> object:
        """The default as a number, a Boolean or a text, as JSON can hold it."""
        return str(self.default) if hasattr(self.type, "parse") else self.default

    @property
    def choices(self) -> tuple[str, ...]:
        """The possible values, if they can be listed; else empty."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def parse(self, value: object) -> object:
        """A value of the option's type, read from text if need be.

        Raises:
            InvalidParameterError: a text that cannot be read, or a value of another type.
        """
        value = as_python(value)
        if hasattr(self.type, "parse"):
            return self._object(value)
        parsed = self._number(value) if self.type in (int, float) else self._word(value)
        if parsed is not None:
            return parsed
        raise InvalidParameterError(f"{self.name}={shown(value)}: must be {self._expected}")

    def _number(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        try:
            number = self.type(value)
        except (ValueError, OverflowError):
            return None
        if self.type is int and abs(number) >= 2**63:
            return None
        return number if isinstance(value, str) or number == value else None

    def _object(self, value: object) -> object:
        if isinstance(value, self.type):
            return value
        try:
            return self.type.parse(value)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"{self.name}={shown(value)}: {error}") from None

    def _word(self, value: object) -> object:
        if self.type is bool:
            words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
            return words.get(value.lower() if isinstance(value, str) else shown(value).lower())
        return value if isinstance(value, str) and value in (self.choices or (value,)) else None

    @property
    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        names = {float: "a number", int: "a whole number", bool: "true or false"}
        return names.get(self.type, "text")


def options_of(function: Callable[..., object]) -> dict[str, Option]:
    """The parameters with a default of a class or function, by name."""
    typed: Any = function
    hints = get_type_hints(typed.__init__ if isinstance(function, type) else typed)
    return {
        name: Option(name, hints[name], parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }


def resolve(
    owner: str, options: Mapping[str, Option], values: Mapping[str, object]
) -> dict[str, object]:
    """The values by name, converted to their options' types.

    Raises:
        InvalidParameterError: an option that the owner does not have, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise InvalidParameterError(
            f"options={shown(values)}: must map names to values, such as {{'budget': 0.2}}"
        )
    for name in values:
        if name not in options:
            if not options:
                raise InvalidParameterError(f"option {shown(name)}: {owner} has no options")
            near = difflib.get_close_matches(shown(name), options, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidParameterError(
                f"option {shown(name)}: {owner} has no such option; {hint}it has "
                f"{', '.join(options)}"
            )
    return {name: options[name].parse(value) for name, value in values.items()}
