"""The outputs of one HTTP request, as they arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType

from outrider.engine import Engine, Request
from outrider.serve.errors import ApiError
from outrider.serve.worker import Step, Subscriber, Worker


class Generation:
    """Some requests that run: an asynchronous iterator of what has arrived, lists of steps.

    Leaving the ``with`` block aborts what is not over.

    Args:
        worker: runs the requests.
        engine: the engine that they run in.
        requests: the requests; outputs are numbered in their order.
        timeout: most seconds until the last step; None sets no bound.
        interval: least seconds from one step of an output to the next.
        wants_rounds: whether the steps say what each round did.

    Attributes:
        began: when the requests were submitted, as ``time.perf_counter`` counts.
        first_round: when the first round ended; None before.
        last_rounds: when the last round of each output ended.
        num_open: outputs that are not over.
        disconnected: whether the client has left, so that the iterator ended early.
    """

    def __init__(
        self,
        worker: Worker,
        engine: Engine,
        requests: Sequence[Request],
        timeout: float | None,
        *,
        interval: float = 0.0,
        wants_rounds: bool = False,
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.began = time.perf_counter()
        self.first_round: float | None = None
        self.last_rounds: dict[int, float] = {}
        self.disconnected = False
        self.num_open = len(requests)
        self._worker = worker
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._arrived: list[Step] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._subscriber = Subscriber(
            engine, requests, self._take, self._loop, interval, wants_rounds
        )

    def start(self) -> None:
        """Submits the requests."""
        self._worker.submit(self._subscriber)
        if self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._time_out)

    def close(self) -> None:
        """Aborts what is not over; the rows are free before the next step. May be repeated."""
        if self.num_open:
            self._end()
            with suppress(Exception):  # the worker has stopped, and nothing runs
                self._worker.abort(self._subscriber)

    def disconnect(self) -> None:
        """Ends the iterator, since the client has left."""
        if self.num_open:
            self.disconnected = True
            self.close()

    async def __aiter__(self) -> AsyncIterator[list[Step]]:
        while self.num_open or self._arrived:
            if not self._arrived:
                self._news.clear()
                await self._news.wait()
            steps, self._arrived = self._arrived, []
            if steps:
                yield steps
        if self._error is not None:
            raise self._error

    def _take(self, steps: list[Step | Exception]) -> None:
        """Takes new steps from the worker; an exception ends all outputs."""
        for step in steps:
            if not self.num_open:
                return  # closed in the meantime
            if isinstance(step, Exception):
                self._error = step
                self.close()
                return
            if self.first_round is None:
                self.first_round = step.done[0].at
            self._arrived.append(step)
            self.num_open -= step.over
        self._news.set()
        if not self.num_open:
            self._end()

    def _end(self) -> None:
        """Nothing more arrives."""
        self.num_open = 0
        self._news.set()
        if self._timer is not None:
            self._timer.cancel()

    def _time_out(self) -> None:
        self._error = ApiError(
            f"the request took more than the {self._timeout:g} s that the server allows: ask for "
            f"fewer tokens, or try again when the server is less busy",
            status=408,
            code="timeout",
            headers={"x-should-retry": "false"},
        )
        self.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
