"""The program of the new process: confines itself, runs the code, and reports how it ended.

It reads a JSON order from standard input, and writes one line of JSON to the file descriptor that
the order names. Only code that runs to its end has passed: one that leaves early, by ``sys.exit``
for example, has not.

Imports the standard library only.
"""

import json
import os
import sys
import types
from typing import Any

from outrider.lab.sandbox import audit, landlock, limits, seccomp

_MOST_DETAIL = 500


def main() -> None:
    """Runs the order, and ends the process."""
    order = json.load(sys.stdin)
    _quiet()
    sys.path[:] = [path for path in sys.path if path != order["package"]]
    _confine(order)
    detail = _failure(order["source"])
    verdict = {"key": order["key"], "passed": detail is None, "detail": detail or ""}
    os.write(order["report"], json.dumps(verdict).encode())
    os._exit(0)


def _quiet() -> None:
    """Reads nothing and prints nowhere from now on."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def _confine(order: dict[str, Any]) -> None:
    readable, writable = order["readable"], [order["folder"]]
    limits.apply(limits.Limits(**order["limits"]))
    if order["kernel"]:
        landlock.restrict(readable, writable)
        seccomp.restrict()
    if order["hook"]:
        audit.restrict(readable, writable)


def _failure(source: str) -> str | None:
    """What the code raised; None if it ran to its end."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(source, "program.py", "exec"), vars(module))
    except BaseException as error:
        return f"{type(error).__name__}: {_message(error)}"[:_MOST_DETAIL]
    return None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # the code's own exception, whose __str__ may do anything
        return ""


if __name__ == "__main__":
    main()
