"""Worker processes on one machine, restarted when they die.

A worker that dies, by a signal or for want of memory, loses nothing but the task that it was at,
which another worker gets. A worker whose parent has died ends after its task.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from outrider.core.errors import OutriderError

T = TypeVar("T")
R = TypeVar("R")

MOST_DEATHS = 5
"""Workers that may die at one task, or in succession before any of them is ready."""


class WorkerDiedError(OutriderError):
    """Workers died again and again, at the same task or before they were ready."""


def in_processes(
    start: Callable[[int], Callable[[T], R]],
    tasks: Iterable[tuple[int, T]],
    num_workers: int,
    watch: Callable[[list[int]], None] = lambda pids: None,
) -> Iterator[tuple[int, R]]:
    """Maps tasks by worker processes; gives results in the order in which they are finished.

    Args:
        start: called in each worker with its number, from 0; makes what maps tasks there. It, the
            tasks and the results are pickled.
        tasks: each with a number that is its own. They are read as workers become free.
        num_workers: processes.
        watch: told the ids of the processes whenever they change.

    Raises:
        WorkerDiedError: see :data:`MOST_DEATHS`. At a task: once all others are finished.
        Exception: what ``start``, or a worker's function, raised in its process.
    """
    pool = _Pool(start, deque(), iter(tasks), num_workers, watch)
    try:
        yield from pool.results()
    finally:
        pool.close()


@dataclass
class _Worker(Generic[T]):
    """A process.

    Attributes:
        slot: its number.
        process, connection: the process, and the way to it.
        is_ready: whether it takes tasks.
        task: what it is at.
    """

    slot: int
    process: multiprocessing.process.BaseProcess
    connection: Connection
    is_ready: bool = False
    task: tuple[int, T] | None = None


class _Pool(Generic[T, R]):
    def __init__(
        self,
        start: Callable[[int], Callable[[T], R]],
        again: deque[tuple[int, T]],
        tasks: Iterator[tuple[int, T]],
        num_workers: int,
        watch: Callable[[list[int]], None],
    ) -> None:
        self._start, self._watch = start, watch
        self._again, self._tasks = again, tasks
        self._context = multiprocessing.get_context("spawn")  # a fork would inherit threads
        self._deaths: Counter[int] = Counter()
        self._failed_starts = 0
        self._given_up: list[int] = []
        self._workers: list[_Worker[T]] = []
        for slot in range(num_workers):
            self._workers.append(self._spawn(slot))
        self._tell()

    def results(self) -> Iterator[tuple[int, R]]:
        """The results, until all tasks are finished or given up."""
        while self._feed():
            ready = wait([worker.connection for worker in self._workers])
            for worker in [each for each in self._workers if each.connection in ready]:
                try:
                    kind, value = worker.connection.recv()
                except (EOFError, OSError):
                    self._replace(worker)
                    continue
                if kind == _FAILED:
                    raise value
                if kind == _READY:
                    worker.is_ready, self._failed_starts = True, 0
                    continue
                assert worker.task is not None
                number, worker.task = worker.task[0], None
                yield number, value
        if self._given_up:
            raise WorkerDiedError(
                f"{MOST_DEATHS} workers died at {_listed(sorted(self._given_up))}, perhaps for "
                f"want of memory; the others are finished and kept: give workers more memory, by "
                f"fewer of them or smaller batches, and run the same command again"
            )

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()

    def _feed(self) -> bool:
        """Hands tasks to workers that have none; whether any worker has a task then.

        Without ready workers nothing is known of the tasks that are left, so one is taken to see
        whether there are any.
        """
        for worker in self._workers:
            if worker.is_ready and worker.task is None:
                task = self._next()
                if task is None:
                    break
                worker.task = task
                with suppress(OSError):  # it died; its connection reports the end
                    worker.connection.send(task[1])
        if any(worker.task for worker in self._workers) or self._again:
            return True
        task = self._next()
        if task is not None:
            self._again.append(task)
        return task is not None

    def _next(self) -> tuple[int, T] | None:
        return self._again.popleft() if self._again else next(self._tasks, None)

    def _spawn(self, slot: int) -> _Worker[T]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, self._start, slot), name=f"worker {slot}", daemon=True
        )
        process.start()
        theirs.close()  # so that the process alone holds its end, and its death closes it
        return _Worker(slot, process, ours)

    def _replace(self, worker: _Worker[T]) -> None:
        """Starts a new worker in the place of one that died, whose task another one gets."""
        worker.process.join()
        worker.connection.close()
        if not worker.is_ready:
            self._failed_starts += 1
            if self._failed_starts == MOST_DEATHS:
                raise WorkerDiedError(
                    f"{MOST_DEATHS} workers in succession died before they were ready, the last "
                    f"one {_ending(worker.process.exitcode)}: perhaps the models need more memory "
                    f"than there is for so many workers"
                )
        if worker.task is not None:
            number = worker.task[0]
            self._deaths[number] += 1
            if self._deaths[number] < MOST_DEATHS:
                self._again.append(worker.task)
            else:
                self._given_up.append(number)
        self._workers[self._workers.index(worker)] = self._spawn(worker.slot)
        self._tell()

    def _tell(self) -> None:
        self._watch([worker.process.pid for worker in self._workers if worker.process.pid])


_READY, _DONE, _FAILED = "ready", "done", "failed"


def _work(connection: Connection, start: Callable[[int], Callable[[T], R]], slot: int) -> None:
    """What a worker does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    try:
        function = start(slot)
        connection.send((_READY, None))
        while True:
            connection.send((_DONE, function(connection.recv())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has ended
    except Exception as error:
        connection.send((_FAILED, portable(error)))


def portable(error: Exception) -> Exception:
    """The error, or what can be said of it where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return OutriderError(f"a worker failed: {type(error).__name__}: {error}")
    return error


def _ending(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"with exit code {exitcode}"
    return f"by signal {-exitcode} ({signal.Signals(-exitcode).name})"


def _listed(numbers: list[int]) -> str:
    some = ", ".join(str(number) for number in numbers[:5])
    return f"block {some}" if len(numbers) == 1 else f"blocks {some}{'…' * (len(numbers) > 5)}"
