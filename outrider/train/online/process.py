"""A learner in a process of its own: what it does, and how it dies, cannot disturb generation.

The process is a fresh interpreter that runs this package (``__main__.py``). Unlike a process of
``multiprocessing`` it does not import the user's script again, which therefore needs no guard.
Messages are pickles over its standard input and output; what it prints goes to ``trainer.log`` in
the folder.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Thread
from typing import IO, Any

from outrider.train.online.learner import Crashed, Plan, Stop, learn
from outrider.train.online.mailbox import Mailbox

LOG = "trainer.log"


class ProcessWorker:
    """Starts the process.

    Args:
        plan: what the learner begins with.
        handle: takes its messages, in a thread of this object's; :class:`Crashed` is the last one
            if the process ends by itself.
    """

    def __init__(self, plan: Plan, handle: Callable[[Any], None]) -> None:
        self._handle = handle
        self._mailbox = Mailbox(plan.settings.buffer_samples)
        self._log = plan.folder / LOG
        self._is_closing = False
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "outrider.train.online"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(plan.settings.threads),
            )
        self._mailbox.put(plan)
        self._threads = [Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """What the process does."""
        return self._process.pid

    @property
    def num_dropped(self) -> int:
        """Samples that came faster than they were learned."""
        return self._mailbox.num_dropped

    def post(self, message: Any) -> None:
        """Sends a message; never waits."""
        self._mailbox.put(message)

    def close(self, timeout: float) -> None:
        """Ends the process: after its step and a checkpoint, or by force after a time."""
        self._is_closing = True
        self._mailbox.clear()
        self._mailbox.put(Stop())
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._mailbox.put(None)  # wakes the writing thread, if the process died before
        for thread in self._threads:
            thread.join(timeout)

    def _write(self) -> None:
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError), stream:  # closed by a process that ends
            while (message := self._mailbox.get()) is not None:
                pickle.dump(message, stream)
                stream.flush()
                if isinstance(message, Stop):
                    return

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for message in _messages(stream):
                self._handle(message)
        code = self._process.wait()
        self._mailbox.put(None)
        if not self._is_closing:
            self._handle(Crashed(f"process {self.pid} ended with {self._reason(code)}"))

    def _reason(self, code: int) -> str:
        """What ended the process: a signal, or what the last line of its log says."""
        if code < 0:
            return f"signal {-code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"exit status {code}{': ' if lines else ''}{lines[-1] if lines else ''}"


def _environment(threads: int) -> dict[str, str]:
    """This process's environment, with its import path and as few threads as allowed."""
    path = os.pathsep.join(each or os.curdir for each in sys.path)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _messages(stream: IO[bytes]) -> Iterator[Any]:
    """The messages of a stream until it ends, be it in the middle of one."""
    while True:
        try:
            yield pickle.load(stream)
        except (EOFError, pickle.UnpicklingError, OSError):
            return


def run_learner() -> None:
    """What the process does."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not end up among the messages
    plan: Plan = pickle.load(source)
    with contextlib.suppress(AttributeError, OSError):  # Windows has no nice
        os.nice(plan.settings.niceness)
    import torch

    torch.set_num_threads(plan.settings.threads)
    inbox = Mailbox(plan.settings.buffer_samples)

    def receive() -> None:
        for message in _messages(source):
            inbox.put(message)
        inbox.put(Stop())  # whoever generates is gone

    def send(message: Any) -> None:
        pickle.dump(message, sink)
        sink.flush()

    Thread(target=receive, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):
        learn(plan, send, inbox)
