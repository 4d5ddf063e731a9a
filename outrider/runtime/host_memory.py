"""Free memory of the host, as far as this process may use it.

A container may have less than its host: Linux limits the memory of a control group and of the
groups around it. Of the memory that a group uses, file pages that nothing has read lately
(``inactive_file``) can be had back at once, so they count as free, as in ``MemAvailable``.

    version 2    memory.max, memory.current, in the group's folder and in those above it
    version 1    memory.limit_in_bytes, memory.usage_in_bytes, below the folder ``memory``
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
_VERSION_2 = "memory.max", "memory.current"
_UNLIMITED = 2**62
"""In version 1, a group without a limit has the largest number of whole pages, some 2⁶³ bytes."""


def available_bytes() -> int:
    """Bytes that this process can still allocate: free memory of the host or, if that is less, what
    the limits of its control groups leave."""
    return min([_of_host(), *left_in_groups(GROUPS, _read(_OWN))])


def left_in_groups(root: Path, own: str) -> Iterator[int]:
    """Bytes that each control group around a process leaves it; none of groups without a limit.

    Args:
        root: where control groups are mounted.
        own: the lines of ``/proc/self/cgroup``, ``NUMBER:CONTROLLERS:PATH`` each.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        limit_file, used_file = _VERSION_1 if controllers else _VERSION_2
        group = top / path.strip("/")
        # inside a container the path may be the host's; the group is then mounted at the top
        for folder in [group, *group.parents]:
            limit = _read(folder / limit_file).strip()
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield from _left(folder, int(limit), used_file)
            if folder == top:
                break


def _left(folder: Path, limit: int, used_file: str) -> Iterator[int]:
    used = _read(folder / used_file).strip()
    if used.isdigit():
        yield max(0, limit - int(used) + _inactive_file(folder))


def _inactive_file(folder: Path) -> int:
    """Bytes of file pages that can be had back, those of the groups below included."""
    lines = (line.split() for line in _read(folder / "memory.stat").splitlines())
    values = {name: int(value) for name, value in lines}
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _of_host() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    """The text of a file; none if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
