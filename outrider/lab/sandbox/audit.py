"""An audit hook of Python that denies files, processes, signals, sockets and foreign functions.

A safety net where the kernel does not confine the process: the hook sees what Python's own
functions announce (PEP 578), and not what a library in C does.

Imports the standard library only: the new process imports this file before it is confined.
"""

import os
import sys
from collections.abc import Callable, Iterable

_DENIED = (
    "os.exec os.fork os.forkpty os.kill os.killpg os.posix_spawn os.spawn os.startfile os.system "
    "pty.spawn signal.pthread_kill subprocess.Popen resource.setrlimit resource.prlimit "
    "ctypes.dlopen ctypes.dlsym ctypes.cdata ctypes.call_function fcntl.ioctl syslog.openlog"
).split()
_DENIED_FAMILIES = ("socket.", "ftplib.", "http.", "smtplib.", "urllib.", "winreg.", "msvcrt.")
_PATHS = {  # event: the arguments that are paths, all of which it changes
    "os.chflags": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.link": (0, 1),
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.setxattr": (0,),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "os.utime": (0,),
}
_LISTINGS = ("os.chdir", "os.listdir", "os.listxattr", "os.getxattr", "os.scandir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Denies all of it from now on, for good: a denied call raises PermissionError.

    Args:
        readable: files and folders to read.
        writable: folders in which files may be changed as well.
    """
    changeable = tuple(map(os.path.realpath, writable))
    roots = (*map(os.path.realpath, readable), *changeable)
    sys.addaudithook(_hook(roots, changeable))


def _hook(
    roots: tuple[str, ...], changeable: tuple[str, ...]
) -> Callable[[str, tuple[object, ...]], None]:
    realpath, fsdecode = os.path.realpath, os.fsdecode
    denied, families = frozenset(_DENIED), _DENIED_FAMILIES

    def check(event: str, path: object, allowed: tuple[str, ...]) -> None:
        if path is None or isinstance(path, int):  # a file that is open already
            return
        full = realpath(fsdecode(path))  # type: ignore[arg-type]
        if not any(full == root or full.startswith(root + "/") for root in allowed):
            raise PermissionError(f"{event}: {full} is outside the program's folder")

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writing = isinstance(flags, int) and flags & _WRITING
            check(event, path, changeable if writing else roots)
        elif event in _PATHS:
            for index in _PATHS[event]:
                check(event, arguments[index], changeable)
        elif event in _LISTINGS:
            check(event, arguments[0], roots)
        elif event in denied or event.startswith(families):
            raise PermissionError(f"{event}: not allowed for generated code")

    return hook
