"""The compiled programs of models that several engines run: taken over from the background, between
two rounds, for all of these engines at once."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from outrider.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from outrider.engine.background import BackgroundCompiler
    from outrider.engine.late_kernels import LateKernels


class SharedPrograms:
    """What the engines on the same models have in common: the compiler of their programs, and the
    schedulers whose requests run by them.

    Attributes:
        compiler: what compiles missing programs in the background; None once all are taken over.
        num_changes: how often programs were taken over.
        late_kernels: gives the models their kernels once these are compiled; None where they had
            them at once.
    """

    def __init__(self) -> None:
        self.compiler: BackgroundCompiler | None = None
        self.num_changes = 0
        self.late_kernels: LateKernels | None = None
        self._schedulers: WeakSet[Scheduler] = WeakSet()
        self._lock = Lock()

    def add(self, *schedulers: Scheduler) -> None:
        """Notes whose requests run by these programs."""
        with self._lock:
            self._schedulers.update(schedulers)

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedulers of all engines."""
        with self._lock:
            return list(self._schedulers)

    @property
    def wait_for_idle(self) -> bool:
        """Whether programs have waited long for a moment without requests, so that new ones should
        wait for it."""
        compiler = self.compiler
        return compiler is not None and compiler.waits_for_idle

    def take_over(self) -> None:
        """Loads programs that were compiled in the background; called between two rounds."""
        if self.compiler is None:
            return
        with self._lock:
            if (compiler := self.compiler) is None:  # another thread took over the last ones
                return
            num_missing = compiler.num_missing
            compiler.take_over(idle=all(scheduler.is_idle for scheduler in self._schedulers))
            self.num_changes += compiler.num_missing < num_missing
            if not compiler.num_missing:
                self.compiler = None
