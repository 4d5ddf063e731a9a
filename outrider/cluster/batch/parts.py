"""Finished blocks on disk, from which an interrupted run goes on.

The folder OUT.parts has a file per finished block, renamed into place when it is complete, and
``batch.json``, which says what the blocks depend on. Once all blocks are there they are joined, in
order, into OUT, which thus appears whole or not at all, and the folder is removed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.cluster.batch.answer import Answers
from outrider.core.errors import InvalidParameterError, OutriderError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_CONTENTS = "batch.json"
_TOLD = 200  # most errors of a run that are read back


class Parts:
    """The finished blocks of an output.

    Args:
        out: the output.
        contents: what its blocks depend on, by name.
    """

    def __init__(self, out: Path, contents: Mapping[str, Any]) -> None:
        self._out = out
        self._contents = json.loads(json.dumps(contents, default=str))
        self.folder = out.parent / (out.name + ".parts")

    @contextmanager
    def opened(self, *, overwrite: bool) -> Iterator[None]:
        """Makes the folder, or goes on with it, and keeps other runs from it in the meantime.

        Raises:
            InvalidParameterError: the output exists or is a folder, or the folder of its blocks
                belongs to other prompts or options, or to a run that goes on.
        """
        if self._out.is_dir():
            raise InvalidParameterError(f"'{self._out}' is a folder: name a file in it")
        if self._out.exists() and not overwrite and not self.folder.exists():
            raise InvalidParameterError(
                f"'{self._out}' exists: name another output, or overwrite it with --overwrite"
            )
        with _disk_errors(self._out):
            self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            self._lock(lock.fileno())
            self._check_contents()
            yield

    @property
    def finished(self) -> set[int]:
        """The numbers of the finished blocks."""
        return {int(path.stem) for path in self.folder.glob("*.jsonl")}

    def add(self, number: int, answers: Answers) -> None:
        """Keeps the answers of a block."""
        with _disk_errors(self._out):
            if answers.errors:
                _write(self._path(number, ".errors"), json.dumps(answers.errors))
            _write(self._path(number, ".jsonl"), answers.text)

    def errors(self) -> tuple[int, list[tuple[int, str]]]:
        """How many lines failed, and the numbers and errors of the first of them."""
        count = 0
        first: list[tuple[int, str]] = []
        for path in sorted(self.folder.glob("*.errors")):
            errors = [(line, why) for line, why in json.loads(path.read_text(encoding="utf-8"))]
            count += len(errors)
            first += errors[: _TOLD - len(first)]
        return count, first

    def join(self, num_blocks: int) -> None:
        """Writes the output and removes the folder."""
        partial = self._out.with_name(self._out.name + ".partial")
        with _disk_errors(self._out):
            with open(partial, "wb") as whole:
                for number in range(num_blocks):
                    with open(self._path(number, ".jsonl"), "rb") as part:
                        shutil.copyfileobj(part, whole)
                _flush(whole.fileno())
            partial.replace(self._out)
            self._remove_folder()

    def _remove_folder(self) -> None:
        """Removes the folder, under another name: what is left of it if that is interrupted is no
        run to go on with."""
        removed = self.folder.with_name(self.folder.name + ".removed")
        shutil.rmtree(removed, ignore_errors=True)  # left by an earlier run
        self.folder.rename(removed)
        shutil.rmtree(removed)

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:08d}{suffix}"

    def _lock(self, descriptor: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidParameterError(
                f"another run writes '{self._out}': wait for its end, or name another output"
            ) from None

    def _check_contents(self) -> None:
        path = self.folder / _CONTENTS
        if not path.exists():
            with _disk_errors(self._out):
                _write(path, json.dumps(self._contents, indent=1, sort_keys=True) + "\n")
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found == self._contents:
            return
        names = sorted(found.keys() | self._contents.keys())
        name = next(each for each in names if found.get(each) != self._contents.get(each))
        raise InvalidParameterError(
            f"'{self.folder}' holds blocks of a run with other {name} ({found.get(name)!r}, and "
            f"now {self._contents.get(name)!r}): give the same, or remove the folder"
        )


def _write(path: Path, text: str) -> None:
    """Writes a file atomically."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        _flush(file.fileno())
    partial.replace(path)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


@contextmanager
def _disk_errors(out: Path) -> Iterator[None]:
    """Turns errors of the disk into one that says what to do."""
    try:
        yield
    except OSError as error:
        remedy = "free some room" if error.errno == errno.ENOSPC else "name another output"
        raise OutriderError(
            f"cannot write '{out}': {error.strerror or error}; finished blocks are kept: {remedy}, "
            f"and run the same command again"
        ) from error
