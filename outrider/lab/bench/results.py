"""The results of a benchmark on disk: ``cells.jsonl``, one cell per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import InvalidParameterError
from outrider.lab.bench.record import CellResult
from outrider.lab.frontier.document import dumps
from outrider.lab.whole_file import write_whole

JOURNAL = "journal.jsonl"
CELLS = "cells.jsonl"


def write_cells(folder: Path | None, results: Sequence[CellResult]) -> None:
    """Writes ``cells.jsonl``: these results, and those of other cells that it already has. The file
    is replaced at once, so that an interruption leaves the old one.

    Raises:
        InvalidParameterError: it cannot be written.
    """
    if folder is None:
        return
    path = folder / CELLS
    new = {result.key for result in results}
    kept = [line for line in _lines(path) if _key_of(line) not in new]
    lines = [*map(as_line, results), *kept]
    try:
        write_whole(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise InvalidParameterError(
            f"cannot write '{path}': {error.strerror or error}; the measurements are in {JOURNAL}, "
            f"and the same command goes on from them"
        ) from error


def as_line(result: CellResult) -> str:
    """A result as one line of JSON; infinite numbers and NaN become strings."""
    return dumps(result.as_dict())


def read_cells(path: Path) -> list[CellResult]:
    """The results in a ``cells.jsonl``, or in the folder that holds one.

    Raises:
        InvalidParameterError: there is none, or a line is no result.
    """
    file = path / CELLS if path.is_dir() else path
    if not file.is_file():
        raise InvalidParameterError(f"no results in '{path}': `outrider bench -o` writes them")
    results = []
    for number, line in enumerate(_lines(file), 1):
        try:
            results.append(CellResult.from_dict(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidParameterError(
                f"results '{file}', line {number}: no cell of outrider bench "
                f"({type(error).__name__}): run it again"
            ) from None
    return results


def _key_of(line: str) -> str | None:
    """The key of a line's cell; None for a line that is no result, which its owner may repair."""
    try:
        return str(json.loads(line)["cell"]["key"])
    except (ValueError, KeyError, TypeError):
        return None


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line for line in path.read_text("utf-8", "replace").split("\n") if line]
