"""Reads one call of a function, a JSON object, character by character as its text arrives.

``{"name": "f", "arguments": {"x": 1}}``. The arguments stay as they were written.
"""

import json
from collections.abc import Callable

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class JsonCall:
    """A call as far as its text came.

    Attributes:
        name: the function's name, once it is known.
        raw: the text that was read.
        is_over: whether the object has ended.
        is_wrong: whether the text is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.is_over = False
        self.is_wrong = False
        self._next: Callable[[str], None] = self._before
        self._arguments = ""
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def arguments(self) -> str:
        """The text of the arguments so far."""
        is_open = self._next == self._in_value and self._key in _ARGUMENTS
        return self._value if is_open and self._value[:1] == "{" else self._arguments

    @property
    def is_known(self) -> bool:
        """Whether it is certain to be a call: its name is known and its arguments have begun."""
        return self.name is not None and (self.arguments != "" or self.is_over)

    def push(self, character: str) -> None:
        """Reads the next character; none after the object is over or wrong."""
        self.raw += character
        self._next(character)

    def _before(self, character: str) -> None:
        self._expect(character == "{", self._before_key)

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._begin_value(self._in_key)
            self._in_key(character)
        elif character == "}":
            self._finish()
        elif character not in _SPACE and character != ",":
            self.is_wrong = True

    def _in_key(self, character: str) -> None:
        if self._reads_on(character):
            return
        self._key = str(self._decoded())
        self._next = self._after_key

    def _after_key(self, character: str) -> None:
        if character not in _SPACE:
            self._expect(character == ":", self._before_value)

    def _before_value(self, character: str) -> None:
        if character not in _SPACE:
            self._begin_value(self._in_value)
            self._in_value(character)

    def _in_value(self, character: str) -> None:
        is_scalar_over = self._depth == 0 and not self._in_string and character in ",}"
        if is_scalar_over and self._value:
            self._take_value()
            self._next = self._before_key
            self._before_key(character)
            return
        if not self._reads_on(character):
            self._take_value()
            self._next = self._before_key

    def _begin_value(self, reader: Callable[[str], None]) -> None:
        self._value, self._depth, self._next = "", 0, reader

    def _reads_on(self, character: str) -> bool:
        """Adds a character to the value; whether a string, list or object goes on after it."""
        self._value += character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth > 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth > 0
        return True

    def _take_value(self) -> None:
        value = self._decoded()
        if self._key == "name":
            self._expect(isinstance(value, str) and value != "", self._before_key)
            self.name = value if isinstance(value, str) else None
        elif self._key in _ARGUMENTS:  # some models write the JSON as a string
            self._arguments = value if isinstance(value, str) else self._value.rstrip()
            if value is None:
                self._arguments = "{}"

    def _decoded(self) -> object:
        try:
            return json.loads(self._value, strict=False)
        except ValueError:
            self.is_wrong = True
            return None

    def _finish(self) -> None:
        self.is_over = True
        self.is_wrong = self.is_wrong or self.name is None
        self._arguments = self._arguments or "{}"

    def _expect(self, is_right: bool, then: Callable[[str], None]) -> None:
        self.is_wrong = self.is_wrong or not is_right
        self._next = then
