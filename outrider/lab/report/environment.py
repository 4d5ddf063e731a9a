"""The environment block of a report: where and how its cells were measured."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.lab.cell_view import CellView

UNKNOWN = "–"


def environments(views: Sequence[CellView]) -> list[dict[str, Any]]:
    """The different environments of the cells: ``rows`` of name and text, and the ``cells``."""
    found: dict[str, dict[str, Any]] = {}
    for each in views:
        key = json.dumps(each.environment, sort_keys=True, default=str)
        entry = found.setdefault(key, {"rows": list(_rows(each.environment)), "cells": []})
        entry["cells"].append(each.name)
    return list(found.values())


def _rows(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()):
            yield name, ", ".join(f"{key} {each}" for key, each in value.items())
        elif isinstance(value, Mapping | list | tuple):
            yield name, json.dumps(value, ensure_ascii=False, indent=1, default=str)
        else:
            yield name, UNKNOWN if value is None else str(value)
