"""Grammars: what outputs may look like.

A grammar is a set of strings. With it, the target's distribution p at each position is restricted
to the tokens with which the output is still the beginning of a string of the set, and normalised
again; so is the draft's q. It is a logits processor like any other (``params.py``), so that a
lossless method samples exactly from the restricted p. Where the output is a complete string of the
set, it may end, by an end-of-sequence token; where nothing can follow, it must.

This file holds the description only; ``engine/grammar.py`` compiles it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import InvalidParameterError
from outrider.core.values import shown

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Grammar:
    """A set of strings; the classmethods make one.

    Attributes:
        kind: how the source describes the set.
        source: a JSON schema, a regular expression, a JSON list of strings, or a grammar.
    """

    kind: GrammarKind
    source: str

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> "Grammar":
        """The JSON documents that a schema allows.

        Args:
            schema: the schema, as a mapping or as JSON.

        Raises:
            InvalidParameterError: what is no JSON object.
        """
        if isinstance(schema, str):
            try:
                read = json.loads(schema)
            except ValueError as error:
                raise InvalidParameterError(f"json_schema: no valid JSON: {error}") from None
        else:
            read = schema
        if not isinstance(read, Mapping):
            raise InvalidParameterError(f"json_schema={shown(read)}: must be a JSON object")
        try:
            return cls("json_schema", json.dumps(read))
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(
                f"json_schema: cannot be written as JSON: {error}"
            ) from None

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """The strings that a regular expression matches as a whole, in the syntax of Rust's
        ``regex``."""
        return cls("regex", _source("regex", pattern))

    @classmethod
    def choice(cls, strings: Sequence[str]) -> "Grammar":
        """One of these strings.

        Raises:
            InvalidParameterError: no list of non-empty strings.
        """
        listed = None if isinstance(strings, str) else list(strings)
        if not listed or not all(isinstance(each, str) and each for each in listed):
            raise InvalidParameterError(
                f"choice={shown(strings)}: must be a list of non-empty strings"
            )
        return cls("choice", json.dumps(listed))

    @classmethod
    def grammar(cls, source: str) -> "Grammar":
        """The language of a context-free grammar, in the notation of Lark or in GBNF."""
        return cls("grammar", _source("grammar", source))


def _source(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameterError(f"{name}={shown(value)}: must be a non-empty string")
    return value
