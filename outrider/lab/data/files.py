"""Records of files: JSON lines, CSV, Parquet, texts with a prompt per line; also compressed."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.lab.data.layouts import Record

Numbered = Iterator[tuple[str, Record]]
"""Records, each with where it stands, such as ``line 3``."""


def read_bytes(path: Path) -> bytes:
    """A file's content as it is on disk.

    Raises:
        InvalidParameterError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidParameterError(
            f"cannot read data file '{path}': {error.strerror or error}"
        ) from error


def records_of(path: Path, content: bytes) -> Numbered:
    """The records of a file, by its suffix: ``.jsonl``, ``.csv``, ``.parquet``, ``.txt``; a further
    ``.gz`` is decompressed.

    Raises:
        InvalidParameterError: another suffix, or a file that is not what its suffix says.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"]:
        content, suffixes = _decompressed(path, content), suffixes[:-1]
    read = _READERS.get(suffixes[-1] if suffixes else "")
    if read is None:
        raise InvalidParameterError(
            f"data file '{path}': the suffix must be one of {', '.join(_READERS)}, perhaps with "
            f".gz after it"
        )
    return read(path, content)


def _decompressed(path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise InvalidParameterError(
            f"data file '{path}' is not a complete gzip file ({error}): download it again"
        ) from error


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParameterError(
            f"data file '{path}' is not UTF-8 text (byte {error.start}): convert it first"
        ) from None


def _json_lines(path: Path, content: bytes) -> Numbered:
    # Only "\n" ends a line: JSON strings may contain the other characters of str.splitlines.
    for number, line in enumerate(_decoded(path, content).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidParameterError(
                f"data file '{path}', line {number}: no JSON ({error}); a .jsonl file has one JSON "
                f"object per line"
            ) from None
        if not isinstance(record, dict):
            raise InvalidParameterError(
                f"data file '{path}', line {number}: a JSON {type(record).__name__}, where an "
                f"object is needed"
            )
        yield f"line {number}", record


def _csv(path: Path, content: bytes) -> Numbered:
    reader = csv.DictReader(io.StringIO(_decoded(path, content), newline=""), strict=True)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InvalidParameterError(
                    f"data file '{path}', line {reader.line_num}: it has not as many fields as the "
                    f"header, {len(reader.fieldnames or ())}"
                )
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise InvalidParameterError(
            f"data file '{path}', line {reader.line_num}: no CSV ({error})"
        ) from None


def _lines(path: Path, content: bytes) -> Numbered:
    for number, line in enumerate(_decoded(path, content).split("\n"), 1):
        if line.strip():
            yield f"line {number}", {"prompt": line.rstrip("\r")}


def _parquet(path: Path, content: bytes) -> Numbered:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError:
        raise InvalidParameterError(
            f"data file '{path}': reading Parquet needs pyarrow: pip install 'outrider[data]', "
            f"or convert the file to .jsonl"
        ) from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(content)).to_pylist()
    except ArrowException as error:
        raise InvalidParameterError(f"data file '{path}': no Parquet file ({error})") from None
    for number, row in enumerate(rows, 1):
        yield f"row {number}", row


_READERS: dict[str, Callable[[Path, bytes], Numbered]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _lines,
}
