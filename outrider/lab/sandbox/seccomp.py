"""seccomp: the process itself gives up system calls, by a filter that the Linux kernel runs.

Needs no privileges, and holds for root as well. The calls that are given up start processes and
threads, send signals, open sockets, read other processes' memory, or change what holds the process.
Each fails with EPERM. Interface: seccomp(2), and the kernel's ``seccomp_filter.rst``.

Imports the standard library only: the new process imports this file before it is confined.
"""

import ctypes
import errno
import os
import platform
import sys

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Index into a row of ``DENIED``, and the kernel's AUDIT_ARCH constant."""
_FOREIGN = 0x40000000  # x86-64: from here on, calls are those of the x32 interface

DENIED: dict[str, tuple[int | None, int | None]] = {
    # system call: (number on x86-64, number on ARM)
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "open_by_handle_at": (304, 265),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "reboot": (169, 142),
}

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM

Instruction = tuple[int, int, int, int]
"""Operation, how many instructions to skip if true and if false, operand."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction)))


def available() -> bool:
    """Whether the filter exists for this system."""
    return sys.platform.startswith("linux") and platform.machine() in _ARCHITECTURES


def restrict() -> bool:
    """Gives up the system calls of ``DENIED``, for good; whether the kernel does it.

    Raises:
        OSError: the kernel does not take the filter.
    """
    if not available():
        return False
    index, architecture = _ARCHITECTURES[platform.machine()]
    numbers = [number for row in DENIED.values() if (number := row[index]) is not None]
    lines = filter_program(numbers, architecture)
    instructions = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    program = _Program(len(lines), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
    return True


def filter_program(numbers: list[int], architecture: int) -> list[Instruction]:
    """The filter: kills a process of another architecture, answers the calls with EPERM, and allows
    all others."""
    num = len(numbers)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, num + 1, 0, _FOREIGN),
        *((_EQUAL, num - i, 0, number) for i, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR),
    ]
