"""Plans in TOML files.

    target = "big/"
    drafts = ["small/"]
    methods = ["speculative", "mjsd:beams=8,threshold=0.1"]
    gammas = [3, 5]
    temperatures = [0, 0.8]
    data = ["builtin:code", { source = "question.jsonl", tasks = ["qa"], limit = 8 }]

The names are those of :class:`BenchPlan`. Paths of data sets, models and heads that begin with
``./`` or ``../`` are relative to the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError


def read_plan(path: Path) -> dict[str, Any]:
    """The values of a plan's file, for :func:`plan_of`.

    Raises:
        InvalidParameterError: it cannot be read, or is no TOML; the message has the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameterError(f"cannot read plan '{path}': {reason}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidParameterError(f"plan '{path}': {error}") from None
    return _relative(values, path.parent)


def _relative(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _relative(each, folder) for name, each in value.items()}
    if isinstance(value, list):
        return [_relative(each, folder) for each in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str(folder / value)
    return value
