"""Landlock: the process itself gives up all files but some, by three Linux system calls.

Needs no privileges, and holds for root as well. Interface: the kernel's
``Documentation/userspace-api/landlock.rst``. Version 1 (Linux 5.13) covers files, 3 truncation,
4 TCP, 6 (6.12) signals to other processes; what a kernel does not know is left out.

Imports the standard library only: the new process imports this file before it is confined.
"""

import ctypes
import os
import stat
import sys
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVS = 38

_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_READ = _READ_FILE | _READ_DIR
_SPECIAL = 1 << 6 | 1 << 9 | 1 << 11  # character devices, sockets, block devices
_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All rights over files, by the version that added the last one."""
_TCP = 1 << 0 | 1 << 1  # bind, connect
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scopes", ctypes.c_uint64),
    )


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """The kernel's version of Landlock; 0 where it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, _VERSION))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Gives up all files but these, for good; whether the kernel does it.

    Args:
        readable: files and folders to read. Those that do not exist are left out.
        writable: folders in which files may be made, changed and removed as well.

    Raises:
        OSError: the kernel has Landlock and does not do as asked.
    """
    known = version()
    if not known:
        return False
    handled = _ALL[max(each for each in _ALL if each <= known)]
    files = _Ruleset(handled, _TCP if known >= 4 else 0, _SCOPES if known >= 6 else 0)
    ruleset = _call(_CREATE_RULESET, ctypes.byref(files), ctypes.sizeof(files), 0)
    try:
        for path in readable:
            _allow(ruleset, path, handled & _READ)
        for path in writable:
            _allow(ruleset, path, handled & ~_SPECIAL & ~1)
        if _libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            rights &= _READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL
        rule = _PathRule(rights, folder)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(folder)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc().syscall(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
