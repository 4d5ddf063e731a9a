"""The thread that runs the rounds of all engines.

The event loop hands it jobs: requests to add, requests to abort, functions to call between two
rounds. What a round adds to an output returns to the loop, once per step for all requests. Rounds
that follow each other quickly return several at a time, since each return takes time from the next
round: those that end too soon are held back until the loop asks for them. It gets them at once,
whatever the thread is doing then, such as reading another request's prompt. Each engine that has
requests runs a step in its turn. Nothing but this thread touches a scheduler or the models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import sub
from threading import Condition, Lock, Thread
from typing import NamedTuple, TypeVar

from outrider.core.errors import OutriderError
from outrider.engine import Engine, Event, Progress, Request, Row, Scheduler
from outrider.serve.rounds import RecordedRound, RoundRecorder

T = TypeVar("T")
logger = logging.getLogger("outrider.serve")


class RoundDone(NamedTuple):
    """A round of an output, in numbers.

    Attributes:
        drafted: tokens that were drafted.
        accepted: of these, the ones that were emitted.
        forced: of these, the ones that a grammar had forced.
        emitted: tokens that the round added.
        at: when it ended, as ``time.perf_counter`` counts.
    """

    drafted: int
    accepted: int
    forced: int
    emitted: int
    at: float


class Step(NamedTuple):
    """What one round, or several in a row, did to one output.

    Attributes:
        output: which output of the HTTP request.
        event: the new text and tokens.
        done: the rounds.
        row: the output so far. Another thread changes it until it is over.
        over: whether these were the last rounds.
        recorded: what was recorded of the rounds, where the subscriber wants it.
    """

    output: int
    event: Event
    done: tuple[RoundDone, ...]
    row: Row
    over: bool
    recorded: tuple[RecordedRound, ...] = ()


class Subscriber:
    """Who made requests and gets their steps, in the event loop.

    Args:
        engine: the engine of the requests.
        requests: the requests.
        take: called in the event loop with new steps, and with the exception that ended an output.
        loop: the event loop.
        interval: least seconds from one step of an output to the next. Rounds that end sooner
            are handed over together when these are over.
        wants_rounds: whether the rounds are to be recorded.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        take: Callable[[list[Step | Exception]], None],
        loop: asyncio.AbstractEventLoop,
        interval: float = 0.0,
        wants_rounds: bool = False,
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.take = take
        self.loop = loop
        self.interval = interval
        self.wants_rounds = wants_rounds
        self.ids: list[int] = []


class _Output:
    """An output that runs: whose it is, and the rounds that were not handed over."""

    def __init__(self, subscriber: Subscriber, index: int) -> None:
        self.subscriber = subscriber
        self._index = index
        self._row: Row | None = None
        self._over = False
        self._before = (0, 0, 0, 0)
        self._done: list[RoundDone] = []
        self._recorded: list[RecordedRound] = []
        self._holding = False  # until the interval after the last step is over

    def note(self, row: Row, recorded: Sequence[RecordedRound]) -> Step | None:
        """Notes a round; what is to be handed over now."""
        stats = row.stats
        counts = (stats.drafted, stats.accepted, stats.forced, len(row.token_ids))
        drafted, accepted, forced, emitted = map(sub, counts, self._before)
        self._row, self._over, self._before = row, row.over, counts
        self._done.append(RoundDone(drafted, accepted, forced, emitted, time.perf_counter()))
        self._recorded += recorded
        return None if self._holding and not self._over else self._step()

    def release(self) -> Step | None:
        """Ends the interval after a step; what was held back in it. A round that has ended but is
        not noted yet is handed over with it, once it is."""
        self._holding = False
        return self._step()

    def _step(self) -> Step | None:
        if self._row is None or not self._done:
            return None
        event = self._row.event_after(self._before[-1])
        if event is None:
            return None
        step = Step(
            self._index, event, tuple(self._done), self._row, self._over, tuple(self._recorded)
        )
        self._done, self._recorded = [], []
        self._holding = self.subscriber.interval > 0
        return step


_News = tuple[_Output, Step | Exception]


class _Running:
    """An engine's scheduler, and the outputs that it is working on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduler: Scheduler = engine.new_scheduler()
        self.outputs: dict[int, _Output] = {}
        self._recorder = RoundRecorder(engine)

    def add(self, subscriber: Subscriber) -> None:
        for index, request in enumerate(subscriber.requests):
            if subscriber.wants_rounds:
                self._recorder.watch(request)
            request_id = self.scheduler.add(request)
            subscriber.ids.append(request_id)
            self.outputs[request_id] = _Output(subscriber, index)

    def abort(self, subscriber: Subscriber) -> None:
        """Ends a subscriber's outputs. Its ids may be another subscriber's by now: they begin
        anew with each scheduler, and an engine that has been idle gets another scheduler."""
        for request_id in subscriber.ids:
            output = self.outputs.get(request_id)
            if output is not None and output.subscriber is subscriber:
                del self.outputs[request_id]
                self.scheduler.abort(request_id)
        for request in subscriber.requests:
            self._recorder.unwatch(request)

    def step(self) -> list[Progress] | Exception:
        """Runs a step; the requests that took part in a round, or what ended all of them."""
        try:
            return self.scheduler.step()
        except Exception as error:
            return _reportable(error)

    def note(self, progress: list[Progress] | Exception) -> list[_News]:
        """What a step did to whose outputs, as far as it is to be handed over now."""
        if isinstance(progress, Exception):
            return self._fail_all(progress)
        news: list[_News] = []
        for request_id, row in progress:
            output = self.outputs.get(request_id)
            if output is None:
                continue  # aborted while the step ran
            if row.error is not None:
                news.append((output, _reportable(row.error)))
            elif step := output.note(row, self._recorder.take(row.request)):
                news.append((output, step))
            if row.over:
                self._recorder.unwatch(row.request)
                del self.outputs[request_id]
        return news

    def _fail_all(self, error: Exception) -> list[_News]:
        """Ends all outputs with an error that none of them is to blame for; starts over."""
        failed: list[_News] = [(output, error) for output in self.outputs.values()]
        for output, _ in failed:
            for request in output.subscriber.requests:
                self._recorder.unwatch(request)
        self.scheduler, self.outputs = self._engine.new_scheduler(), {}
        return failed


def _reportable(error: Exception) -> Exception:
    """An error for the client; one that is no error of Outrider's own is logged."""
    if isinstance(error, OutriderError):
        return error
    logger.error("a round failed", exc_info=error)
    return OutriderError("a round failed")


class Worker:
    """Runs the engines of a server."""

    def __init__(self) -> None:
        self._noting = Lock()  # until the loop has a step, which another one must not overtake
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = Condition()
        self._stopping = False
        self._running: dict[Engine, _Running] = {}
        self._thread = Thread(target=self._run, name="outrider-rounds", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is running; outputs that are not over stay
        without an end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, without which no output goes on."""
        return self._thread.is_alive()

    def submit(self, subscriber: Subscriber) -> None:
        """Adds a subscriber's requests before the next step."""
        self._post(lambda: self._runner(subscriber.engine).add(subscriber))

    def abort(self, subscriber: Subscriber) -> None:
        """Ends what is left of a subscriber's requests before the next step."""
        self._post(lambda: self._runner(subscriber.engine).abort(subscriber))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function that uses a model before the next step."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(job)
        return future

    def is_idle(self, engine: Engine) -> bool:
        """Whether an engine has no outputs to work on. For functions of :meth:`call`."""
        return engine not in self._running

    @property
    def num_running(self) -> int:
        """Outputs that have a row."""
        return sum(each.scheduler.num_running for each in list(self._running.values()))

    @property
    def num_waiting(self) -> int:
        """Outputs that wait for a row."""
        return sum(each.scheduler.num_waiting for each in list(self._running.values()))

    def _runner(self, engine: Engine) -> _Running:
        if engine not in self._running:
            self._running[engine] = _Running(engine)
        return self._running[engine]

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise OutriderError("the server is shutting down")
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while self._next_jobs():
            self._step_all()

    def _step_all(self) -> None:
        """Runs a step of each engine."""
        for running in list(self._running.values()):
            progress = running.step()
            with self._noting:
                self._deliver(running.note(progress))
        self._drop_idle()

    def _next_jobs(self) -> bool:
        """Waits until there is something to do and does the jobs; False at the end."""
        with self._wake:
            while not (self._stopping or self._jobs or self._running):
                self._wake.wait()
            if self._stopping:
                return False
            jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            try:
                job()
            except Exception:
                logger.exception("a job failed")
        self._drop_idle()
        return True

    def _drop_idle(self) -> None:
        """Forgets the engines that have nothing to do."""
        idle = [engine for engine, running in self._running.items() if not running.outputs]
        for engine in idle:
            del self._running[engine]

    def _deliver(self, news: list[_News]) -> None:
        """Hands news to the subscribers, with one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for output, step in news:
            by_loop.setdefault(output.subscriber.loop, []).append((output, step))
        for loop, its in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, and nobody waits for these
                loop.call_soon_threadsafe(self._take_all, its)

    def _take_all(self, news: list[_News]) -> None:
        """In the event loop: passes steps on, and asks for the rounds that are held back after them
        when the interval is over."""
        by_subscriber: dict[Subscriber, list[Step | Exception]] = {}
        for output, step in news:
            subscriber = output.subscriber
            by_subscriber.setdefault(subscriber, []).append(step)
            if subscriber.interval and isinstance(step, Step) and not step.over:
                subscriber.loop.call_later(subscriber.interval, self._release, output)
        for subscriber, steps in by_subscriber.items():
            subscriber.take(steps)

    def _release(self, output: _Output) -> None:
        """In the event loop: asks for what is held back of an output."""
        with self._noting:
            if step := output.release():
                self._deliver([(output, step)])
