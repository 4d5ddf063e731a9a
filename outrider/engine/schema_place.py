"""Where a JSON schema is wrong, which llguidance's messages do not say."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_SHARED = ("$defs", "definitions")  # what a part of a schema may refer to
_MOST_CHECKS = 200


def schema_place(source: str, problem: str, problem_of: Callable[[str], str]) -> str:
    """The innermost schema within a schema that has the same problem by itself, as a JSON pointer;
    empty if that is the whole schema, or if there are too many to try.

    Args:
        source: the schema, as JSON.
        problem: what is wrong with it.
        problem_of: what is wrong with a schema, as JSON; empty if nothing.
    """
    root = json.loads(source)
    shared = {name: root[name] for name in _SHARED if name in root}
    left = iter(range(_MOST_CHECKS))

    def has_problem(part: Mapping[str, Any]) -> bool:
        if next(left, None) is None:
            return False
        return problem_of(json.dumps({**shared, **part})) == problem

    place, schema = "", root
    while True:
        inner = next((each for each in _parts(schema) if has_problem(each[1])), None)
        if inner is None:
            return place
        place, schema = place + inner[0], inner[1]


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas directly within a schema, each with its pointer."""
    for name in _ONE:
        yield from _schemas(f"/{name}", schema.get(name))
    for name in _LISTED:
        listed = schema.get(name)
        for index, each in enumerate(listed if isinstance(listed, list) else ()):
            yield from _schemas(f"/{name}/{index}", each)
    for name in _NAMED:
        named = schema.get(name)
        for key, each in named.items() if isinstance(named, Mapping) else ():
            yield from _schemas(f"/{name}/{key.replace('~', '~0').replace('/', '~1')}", each)


def _schemas(pointer: str, value: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        yield pointer, value
