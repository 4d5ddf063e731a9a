"""Compilation in the background: requests run at once, by our kernels without a program, while
other processes compile; the engine takes over each program between two rounds.

Where the kernels are missing, too, requests run without them at first: one of the processes
compiles them before anything else, and the engine takes them over before any program.

A program must not change an output. Programs of an exact model's forward passes compute the same
bits as the model, so they are taken over between any two rounds. All others round elsewhere, so
they are taken over while no request runs, as are the kernels: each output comes from one arithmetic
throughout. Where requests overlap for a minute, so that some request runs at any time, new ones
wait until those that run have ended: once for the kernels, and once for all programs together.
"""

import json
import os
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from subprocess import Popen, TimeoutExpired
from threading import Thread
from typing import IO, Any
from weakref import finalize

from outrider.core.errors import OutriderWarning
from outrider.engine import compiler_process
from outrider.engine.warming import Stage, make
from outrider.runtime.executors.compile_cache import Missing
from outrider.runtime.host_processors import num_processors

KERNELS = compiler_process.KERNELS

MOST_PROCESSES = 3
"""Each loads the models for itself."""

_PATIENCE = 5.0  # seconds in which a process ends by itself

_LONGEST_WAIT = 60.0
"""Seconds that what is compiled waits for a moment without requests before new requests wait."""

_LONGEST_HOLD = 300.0
"""Seconds for which new requests wait at most: another engine on the same models may never end."""

News = dict[str, Any]
"""What a process tells: see ``compiler_process.py``."""

Begin = Callable[[], "Popen[bytes]"]
"""Starts a process that waits for the arguments of an engine."""

Start = Callable[[Mapping[str, Any]], "Popen[bytes]"]
"""Starts a process that compiles the programs of the engine of these arguments."""

_LAYERS_FIRST: Start = partial(compiler_process.start, layers=True)


class BackgroundCompiler:
    """Processes that compile an engine's programs, and the programs that the engine has not taken
    over yet.

    Args:
        arguments: of ``load``.
        todo: the programs, the most important ones first.
        num_processes: how many processes compile.
        start: starts a process.

    Raises:
        Exception: no process can be started, or the arguments cannot be pickled; of many kinds.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        todo: Sequence[Stage],
        num_processes: int = 1,
        start: Start = _LAYERS_FIRST,
    ) -> None:
        self._waiting = {stage.number: stage for stage in todo}
        self._news: deque[News] = deque()
        self._ready: list[Stage] = []
        self._waits_since: float | None = None
        self.num_programs = len(self._waiting)
        self._threads = []
        for _ in range(num_processes):
            process = start(arguments)
            assert process.stdin is not None
            finalize(self, _stop, process)
            thread = Thread(target=_listen, args=(process, self._news), daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def num_missing(self) -> int:
        """Programs that the engine has not taken over."""
        return len(self._waiting) + len(self._ready)

    @property
    def num_running(self) -> int:
        """Processes that still compile."""
        return sum(thread.is_alive() for thread in self._threads)

    @property
    def is_running(self) -> bool:
        """Whether some process still compiles."""
        return self.num_running > 0

    @property
    def waits_for_idle(self) -> bool:
        """Whether new requests should wait until those that run have ended, so that programs can be
        taken over."""
        if self._waits_since is None:
            return False
        waited = time.monotonic() - self._waits_since
        return _LONGEST_WAIT <= waited < _LONGEST_WAIT + _LONGEST_HOLD

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the processes have ended; at most so many seconds."""
        ends = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if ends is None else max(0.0, ends - time.monotonic()))

    def take_over(self, *, idle: bool) -> None:
        """Loads programs that are compiled; called between two rounds.

        Args:
            idle: whether no request runs. The kernels, and programs that are not exact, wait for
                that.
        """
        while self._news:
            news = self._news.popleft()
            if "warning" in news:
                warnings.warn(news["warning"], OutriderWarning, stacklevel=2)
            elif "compiled" in news and (stage := self._waiting.pop(news["compiled"], None)):
                self._ready.append(stage)
        has_kernels = KERNELS in map(_number, self._ready)
        if idle or not (has_kernels or (self._ready and not self.is_running)):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time.monotonic()
        if KERNELS in self._waiting or (not idle and has_kernels):
            return  # programs call them
        taken = sorted((stage for stage in self._ready if idle or stage.exact), key=_number)
        for stage in taken:
            make(stage, Missing.LEAVE)
            self._ready.remove(stage)


def _number(stage: Stage) -> int:
    return stage.number


def num_processes(most: int) -> int:
    """How many processes may compile besides this one: one per processor core, but for one."""
    return max(0, min(num_processors() - 1, MOST_PROCESSES, most))


@contextmanager
def compiler_at_hand(wanted: bool, begin: Begin = compiler_process.begin) -> Iterator[Begin]:
    """Starts a process before it is known what to compile: it imports torch and its compiler while
    kernels are compiled and models are loaded.

    Yields a function that starts a process as ``begin`` does, except that its first call returns
    the one that has been started. If nobody calls it, that process is killed.

    Args:
        wanted: whether to start a process now.
        begin: starts a process.
    """
    waiting: list[Popen[bytes]] = []
    if wanted:
        with suppress(OSError):  # whoever needs one tries again
            waiting.append(begin())
    try:
        yield lambda: waiting.pop() if waiting else begin()
    finally:
        for process in waiting:
            compiler_process.kill(process)  # it may not notice while it imports
        compiler_process.kill_ahead()


@contextmanager
def compiling_beside(
    arguments: Mapping[str, Any], num: int, start: Start = compiler_process.start
) -> Iterator[bool]:
    """Lets so many processes compile the programs of an engine while this one does, too; yields
    whether there are any."""
    processes: list[Popen[bytes]] = []
    try:
        for _ in range(num):
            processes.append(start(arguments))
    except Exception:  # without them it takes longer; of many kinds, such as pickle's
        pass
    try:
        yield bool(processes)
    finally:
        for process in processes:
            _stop(process)


def _listen(process: "Popen[bytes]", news: deque[News]) -> None:
    """Queues what a process tells, and that it failed."""
    assert process.stdout is not None
    with process.stdout:
        news.extend(_documents(process.stdout))
    if code := process.wait():
        news.append(
            {
                "warning": f"the process that compiles in the background ended (exit code {code}): "
                f"what it has not compiled runs eagerly"
            }
        )


def _documents(lines: IO[bytes]) -> Iterator[News]:
    for line in lines:
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            yield document


def _stop(process: "Popen[bytes]") -> None:
    """Ends a process; it may have ended. One that does not notice is killed, with its compilers: it
    does not where a process that was forked meanwhile holds its standard input open."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_PATIENCE)
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
        process.wait()
