"""A process that compiles the programs of an engine into the cache folder, at low priority.

    python -m outrider.engine.compiler_process

It imports torch's compiler, reads the pickled arguments of ``load`` from its standard input, loads
the same engine, and compiles what no other process is compiling. It writes one JSON document per
line to its standard output: ``{"warning": …}``, and ``{"compiled": …}`` with the number of each
program that it is done with. Once its standard input ends, as when its parent has ended, it stops
at once; programs appear in the cache folder complete or not at all.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from outrider.core.errors import OutriderError, OutriderWarning

PRIORITY = 10
"""By how much its niceness exceeds that of the process that starts it."""

_MODULE = "outrider.engine.compiler_process"

_NEEDED = ("outrider.engine.loading", "torch._inductor.compile_fx")
"""Modules that take seconds to import."""


def begin() -> "subprocess.Popen[bytes]":
    """Starts the process, which imports what it needs and waits for its arguments; closing its
    ``stdin`` ends it.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is its parent's to handle
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)},
    )


def start(
    arguments: Mapping[str, Any],
    *,
    layers: bool = False,
    begin: Callable[[], "subprocess.Popen[bytes]"] = begin,
) -> "subprocess.Popen[bytes]":
    """Starts the process, and tells it what to compile.

    Args:
        arguments: of ``load``.
        layers: whether the layers of the models are compiled first.
        begin: starts the process, or returns one that has been started.

    Raises:
        OSError: it cannot be started.
        Exception: arguments that cannot be pickled; of many kinds.
    """
    message = pickle.dumps((dict(arguments), layers))
    process = begin()
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.flush()
    return process


def main() -> None:
    """Compiles what the standard input asks for; nothing if it ends before that."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print
    for module in _NEEDED:  # before the priority is lowered: the first program waits for them
        import_module(module)
    lower_priority()
    try:
        arguments, layers = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    Thread(target=_stop_at_end, args=(sys.stdin.fileno(),), daemon=True).start()

    def tell(**document: str | int) -> None:
        answers.write(json.dumps(document) + "\n")

    def warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, OutriderWarning):
            tell(warning=str(message))

    warnings.simplefilter("always", OutriderWarning)
    warnings.showwarning = warn
    try:
        compile_programs(arguments, tell, layers=layers)
    except OutriderError as error:
        tell(warning=f"nothing is compiled in the background: {error}")


def compile_programs(arguments: Mapping[str, Any], tell: Any, *, layers: bool = False) -> None:
    """Loads an engine and compiles what no other process is compiling, and waits for the rest.

    Args:
        arguments: of ``load``.
        tell: called with ``compiled=…`` after each program.
        layers: whether the layers of the models are compiled first.
    """
    import torch

    from outrider.engine.loading import build
    from outrider.engine.warming import layers_of, make, programs_of
    from outrider.runtime.executors.compile_cache import Missing

    torch.set_num_threads(1)
    engine = build(**arguments)
    todo = [*(layers_of(engine) if layers else ()), *programs_of(engine)]
    for missing in (Missing.COMPILE_UNLOCKED, Missing.COMPILE):
        left = []
        for stage in todo:
            if make(stage, missing):
                tell(compiled=stage.number)
            else:
                left.append(stage)
        todo = left


def lower_priority() -> None:
    """Lowers the priority of this process, which leads a session of its own. Linux may share
    processors between sessions first, where only the niceness of the whole session counts."""
    os.nice(PRIORITY)
    with suppress(OSError):  # not every system does, or lets it be changed
        Path("/proc/self/autogroup").write_text(str(PRIORITY), encoding="ascii")


def _stop_at_end(descriptor: int) -> None:
    """Ends this process, and the C++ compilers that it runs, when a stream ends."""
    while os.read(descriptor, 1):  # not by a buffered stream, whose lock Python needs to exit
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main()
