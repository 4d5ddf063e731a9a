"""A learner in a thread of the engine's process, which takes its steps while no request runs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from outrider.train.online.learner import Crashed, Plan, Stop, learn
from outrider.train.online.mailbox import Mailbox


class ThreadWorker:
    """Starts the thread.

    Args:
        plan: what the learner begins with.
        handle: takes its messages, in that thread; :class:`Crashed` is the last one if it ends by
            an unexpected error.
        pause: returns once a step may be taken.
    """

    def __init__(
        self, plan: Plan, handle: Callable[[Any], None], pause: Callable[[], None]
    ) -> None:
        self._mailbox = Mailbox(plan.settings.buffer_samples)
        arguments = plan, handle, self._mailbox, pause
        self._thread = threading.Thread(target=_run, args=arguments, daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Samples that came faster than they were learned."""
        return self._mailbox.num_dropped

    def post(self, message: Any) -> None:
        """Sends a message; never waits."""
        self._mailbox.put(message)

    def close(self, timeout: float) -> None:
        """Ends the thread after its step and a checkpoint."""
        self._mailbox.clear()
        self._mailbox.put(Stop())
        self._thread.join(timeout)


def _run(
    plan: Plan, handle: Callable[[Any], None], mailbox: Mailbox, pause: Callable[[], None]
) -> None:
    with contextlib.suppress(AttributeError, OSError):  # a thread has a priority on Linux only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), plan.settings.niceness)
    try:
        learn(plan, handle, mailbox, pause)
    except Exception as error:
        handle(Crashed(f"{type(error).__name__}: {error}"))
