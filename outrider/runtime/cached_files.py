"""Compiled files in the cache folder, all of which can be compiled again.

A folder that cannot be written is still read; what is compiled then lies in a temporary folder,
which the process removes when it ends.
"""

import errno
import shutil
import tempfile
import warnings
from atexit import register
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.cache_folder import cache_folder

_LITTLE = 2**26  # bytes; with less, a compiler that fails has probably filled the disk
_LOCKLESS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


class LockedError(Exception):
    """Another process compiles the same file."""


def cached_file(kind: str, name: str) -> Path:
    """Where a file of this kind, such as ``programs``, is, or is to be written if it is missing.

    Warns where the cache folder cannot be written and the file is missing.
    """
    folder = cache_folder()
    path = folder / kind / name
    if path.exists():
        return path
    reason = _reason_against_writing(path.parent)
    if reason is None:
        return path
    substitute = _substitute(str(folder), reason) / kind
    substitute.mkdir(exist_ok=True)
    return substitute / name


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a file that several processes may want to write. The operating system
    releases the lock of a process that dies.

    Args:
        path: the file; the lock lies beside it.
        wait: for another process that has the lock.

    Raises:
        LockedError: another process has the lock, and ``wait`` is False.
    """
    lock = FileLock(path.with_suffix(".lock"), timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise LockedError(f"another process compiles {path}") from None
    except NotImplementedError:  # a file system without locks
        pass
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
    try:
        yield
    finally:
        lock.release()


def space_note(folder: Path) -> str:
    """What to add to the message of a compiler that failed: that the disk is full, if it is."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free > _LITTLE:
        return ""
    return (
        f"; the disk of {folder} has {free // 2**20} MiB left: free some, or name another folder "
        f"in OUTRIDER_CACHE"
    )


def _reason_against_writing(folder: Path) -> str | None:
    """Why a folder, which is created if necessary, cannot be written; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


@cache
def _substitute(folder: str, reason: str) -> Path:
    """A temporary folder in place of the cache folder, for this process."""
    from outrider.core.errors import OutriderWarning  # imports torch, which takes a second

    warnings.warn(
        f"the cache folder {folder} cannot be written ({reason}): what is compiled is lost when "
        f"the process ends; name another folder in OUTRIDER_CACHE",
        OutriderWarning,
        stacklevel=3,
    )
    substitute = Path(tempfile.mkdtemp(prefix="outrider-"))
    register(shutil.rmtree, substitute, ignore_errors=True)
    return substitute
