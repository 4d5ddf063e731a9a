"""What ``outrider frontier`` writes: one JSON document, from which tables and figure are drawn."""

import json
import math
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.lab.versions import versions


def about(**settings: Any) -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **settings,
    }


def hardware() -> str:
    """The processor's name, or the GPU's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def write(document: Mapping[str, Any], path: Path) -> None:
    """The document as a file; infinity becomes the word ``inf``, as JSON has none."""
    path.write_text(dumps(document, indent=1) + "\n", encoding="utf-8")


def dumps(document: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(_plain(document), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
