"""Room on disk is checked before something is written, and the error says how much it needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

_SLACK_BYTES = 1 << 20  # of a file's header and the file system


class DiskFullError(OSError):
    """The disk has too little room; says how much is needed."""


def require_space(folder: Path, num_bytes: int, what: str, remedy: str) -> None:
    """Raises DiskFullError unless the disk of a folder has room for so many more bytes.

    Args:
        folder: must exist.
        num_bytes: to be written.
        what: it is.
        remedy: beside freeing some room.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes + _SLACK_BYTES > free:
        raise _disk_full(folder, num_bytes, free, what, remedy)


@contextmanager
def writing(partial: Path, num_bytes: int, what: str, remedy: str) -> Iterator[None]:
    """Writes a file inside the context; one that does not fit is removed.

    Args:
        partial: the file that is being written.
        num_bytes, what, remedy: as of :func:`require_space`.

    Raises:
        DiskFullError: there is no room for it, or it was taken in the meantime.
    """
    require_space(partial.parent, num_bytes, what, remedy)
    try:
        yield
    except Exception as error:  # libraries report a full disk by errors of their own
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(partial.parent).free
        if "No space left" not in str(error) and free > num_bytes + _SLACK_BYTES:
            raise
        raise _disk_full(partial.parent, num_bytes, free, what, remedy) from error


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(each) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(each) for each in value)
    return 0


def _disk_full(folder: Path, needed: int, free: int, what: str, remedy: str) -> DiskFullError:
    return DiskFullError(
        f"{what} needs {needed / 1e6:,.1f} MB more in {folder}, where {free / 1e6:,.1f} MB are "
        f"free; {remedy}. What was complete is intact, the last checkpoint too, and the same "
        "command goes on after it"
    )
