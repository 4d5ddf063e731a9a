"""A process that compiles the programs of an engine into the cache folder, at low priority.

    python -m outrider.engine.compiler_process

It compiles the kernels if they are missing, imports torch's compiler meanwhile, reads the pickled
arguments of ``load`` from its standard input, loads the same engine, and compiles what no other
process is compiling. It writes one JSON document per line to its standard output:
``{"warning": …}``, and ``{"compiled": …}`` with the number of each program that it is done with, or
``KERNELS``. Once its standard input ends, as when its parent has ended, it stops at once; kernels
and programs appear in the cache folder complete or not at all.

Whatever starts the process needs neither torch nor ``transformers``, so that it can do so before it
imports them.
"""

import atexit
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
from threading import Lock, Thread
from typing import Any

from outrider.cache_folder import cache_folder
from outrider.imports.garbage import collection_paused, importing
from outrider.runtime.host_memory import available_bytes
from outrider.runtime.host_processors import num_processors

KERNELS = -1
"""The number by which it tells that the kernels are compiled."""

OVERHEAD = 2**31
"""Bytes of the process beside its models: 0.6 GiB of Python and torch, and the C++ compiler that it
runs, measured with the embedded pair as 1.6 GiB at most."""

PRIORITY = 10
"""By how much its niceness exceeds that of the process that starts it."""

_MODULE = "outrider.engine.compiler_process"

Tell = Callable[..., None]
"""Writes a document, given as keywords, to the standard output."""

_ahead: list["subprocess.Popen[bytes]"] = []

_NEEDED = ("outrider.engine.loading", "torch._inductor.compile_fx")
"""Modules that take seconds to import."""


def has_room() -> bool:
    """Whether the process would have a processor to itself, and the memory to start."""
    return num_processors() > 1 and (not hasattr(os, "sysconf") or available_bytes() >= OVERHEAD)


def begin_ahead() -> None:
    """Starts the process for the engine that will be loaded next, if the cache folder has no
    kernels yet and there is room. It compiles them while this process imports torch and
    ``transformers``."""
    if has_room() and not any((cache_folder() / "kernels").glob("*.so")):
        with suppress(OSError):  # it is tried again
            _ahead.append(begin())
            atexit.register(kill_ahead)


def kill_ahead() -> None:
    """Ends the process of :func:`begin_ahead`, with its C++ compilers, if no engine has it."""
    while _ahead:
        kill(_ahead.pop())


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process to which nobody listens yet at once, with its C++ compilers."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()
    process.wait()


def begin() -> "subprocess.Popen[bytes]":
    """Starts the process, which compiles the kernels, imports what it needs and waits for its
    arguments; closing its ``stdin`` ends it. Returns the one that was started ahead, if any.

    Raises:
        OSError: it cannot be started.
    """
    if _ahead:
        return _ahead.pop()
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
    one_at_a_time = Lock()

    def tell(**document: str | int) -> None:
        with one_at_a_time:
            answers.write(json.dumps(document) + "\n")

    from outrider.runtime.kernels.build import compile_missing_kernels  # imports torch, no more

    Thread(target=_tell_of_kernels, args=(compile_missing_kernels, tell)).start()
    with importing():
        for module in _NEEDED:  # before the priority is lowered: the first program waits for them
            import_module(module)
    lower_priority()
    try:
        arguments, layers = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    Thread(target=_stop_at_end, args=(sys.stdin.fileno(),), daemon=True).start()

    from outrider.core.errors import OutriderError, OutriderWarning

    def warn(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        if issubclass(category, OutriderWarning):
            tell(warning=str(message))

    warnings.simplefilter("always", OutriderWarning)
    warnings.showwarning = warn
    try:
        compile_programs(arguments, tell, layers=layers)
    except OutriderError as error:
        tell(warning=f"nothing is compiled in the background: {error}")


def _tell_of_kernels(compile_missing_kernels: Callable[[], object], tell: Tell) -> None:
    """Compiles the kernels, and tells it. If they do not compile, loading the models warns."""
    from outrider.core.errors import KernelError

    with suppress(KernelError):
        compile_missing_kernels()
        tell(compiled=KERNELS)


def compile_programs(arguments: Mapping[str, Any], tell: Tell, *, layers: bool = False) -> None:
    """Loads an engine and compiles what no other process is compiling, and waits for the rest.

    Args:
        arguments: of ``load``.
        tell: called with ``compiled=…`` after each program.
        layers: whether the layers of the models are compiled first.
    """
    import torch

    from outrider.engine.building import build
    from outrider.engine.warming import layers_of, make, programs_of
    from outrider.runtime.executors.compile_cache import Missing

    torch.set_num_threads(1)
    engine = build(**arguments)
    todo = [*(layers_of(engine) if layers else ()), *programs_of(engine)]
    for missing in (Missing.COMPILE_UNLOCKED, Missing.COMPILE):
        left = []
        for stage in todo:
            with collection_paused():  # a collection after a large program takes a second
                is_made = make(stage, missing)
                if is_made:
                    tell(compiled=stage.number)
            if not is_made:
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
