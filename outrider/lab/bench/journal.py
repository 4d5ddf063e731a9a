"""The journal of a benchmark: one line of JSON per repeat of a cell, added as soon as it is over.

A line is written by one call and reaches the disk before the next repeat begins. A process that is
killed in the middle of a line leaves an incomplete last line, which is dropped when the journal is
opened again. Nothing else is ever removed: the cells of other plans stay.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench.record import Repeat


class Journal:
    """Repeats and metrics by the key of their cell.

    Args:
        path: the file; None keeps everything in memory only.

    Raises:
        InvalidParameterError: the file cannot be read or written, or is no journal.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._repeats: dict[str, dict[int, Repeat]] = defaultdict(dict)
        self._metrics: dict[tuple[str, str], Mapping[str, Any]] = {}
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            content = path.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            if len(complete) < len(content):
                os.truncate(path, len(complete))
        except OSError as error:
            raise InvalidParameterError(
                f"cannot write journal '{path}': {error.strerror or error}"
            ) from error
        for number, line in enumerate(complete.splitlines(), 1):
            self._read(number, line)

    def repeats(self, key: str) -> tuple[Repeat, ...]:
        """The repeats of a cell, in order."""
        found = self._repeats.get(key, {})
        return tuple(found[number] for number in sorted(found))

    def has(self, key: str, number: int) -> bool:
        """Whether a repeat of a cell is over."""
        return number in self._repeats.get(key, {})

    def add(self, repeat: Repeat) -> None:
        """Adds a repeat of a cell."""
        self._repeats[repeat.key][repeat.number] = repeat
        self._write({"kind": "repeat", **repeat.as_dict()})

    def metric(self, key: str, depends: str) -> Mapping[str, Any] | None:
        """A metric of a cell, if it has been computed from the same outputs by the same code.

        Args:
            key: of the cell.
            depends: names the metric, its code and the outputs.
        """
        return self._metrics.get((key, depends))

    def add_metric(self, key: str, depends: str, values: Mapping[str, Any]) -> None:
        """Adds a metric of a cell."""
        self._metrics[key, depends] = values
        self._write({"kind": "metric", "key": key, "depends": depends, "values": dict(values)})

    def _read(self, number: int, line: bytes) -> None:
        try:
            values = json.loads(line)
            if values["kind"] == "repeat":
                repeat = Repeat.from_dict(values)
                self._repeats[repeat.key][repeat.number] = repeat
            else:
                self._metrics[values["key"], values["depends"]] = values["values"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"journal '{self._path}', line {number}: no line that outrider bench has written "
                f"({type(error).__name__}): remove the line, or give another folder"
            ) from None

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = json.dumps(values, ensure_ascii=False) + "\n"
        try:
            with open(self._path, "ab") as file:
                file.write(line.encode("utf-8", "surrogatepass"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InvalidParameterError(
                f"cannot write journal '{self._path}': {error.strerror or error}; all earlier "
                f"repeats are in it, and the same command goes on from them"
            ) from error
