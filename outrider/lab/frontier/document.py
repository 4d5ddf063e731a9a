"""The JSON document of ``outrider frontier``, from which its tables and figure are drawn."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write(document: Mapping[str, Any], path: Path) -> None:
    """Writes the document to a file."""
    path.write_text(dumps(document, indent=1) + "\n", encoding="utf-8")


def dumps(document: Mapping[str, Any] | Sequence[Any], indent: int | None = None) -> str:
    """The document as JSON text; infinite numbers and NaN become strings, as JSON has neither."""
    return json.dumps(_plain(document), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
