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
    """Some requests that run: an asynchronous iterator of their steps.

    Leaving the ``with`` block aborts what is not over.

    Args:
        worker: runs the requests.
        engine: the engine that they run in.
        requests: the requests; outputs are numbered in their order.
        timeout: most seconds until the last step; None sets no bound.
        wants_rounds: whether the steps say what each round did.

    Attributes:
        began: when the requests were submitted, as ``time.perf_counter`` counts.
        first_step: when the first step arrived; None before.
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
        wants_rounds: bool = False,
    ) -> None:
        self.engine = engine
        self.requests = requests
        self.began = time.perf_counter()
        self.first_step: float | None = None
        self.disconnected = False
        self._worker = worker
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._steps: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        self.num_open = len(requests)
        self._subscriber = Subscriber(
            engine, requests, self._steps.put_nowait, self._loop, wants_rounds
        )

    def start(self) -> None:
        """Submits the requests."""
        self._worker.submit(self._subscriber)

    def close(self) -> None:
        """Aborts what is not over; the rows are free before the next step. May be repeated."""
        if self.num_open:
            self.num_open = 0
            with suppress(Exception):  # the worker has stopped, and nothing runs
                self._worker.abort(self._subscriber)

    def disconnect(self) -> None:
        """Ends the iterator, since the client has left."""
        if self.num_open:
            self.disconnected = True
            self.close()
            self._steps.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[Step]:
        while self.num_open:
            step = await self._next()
            if step is None:
                return
            if isinstance(step, Exception):
                self.num_open -= 1
                self.close()
                raise step
            self.num_open -= step.over
            if self.first_step is None:
                self.first_step = time.perf_counter()
            yield step

    async def _next(self) -> Step | Exception | None:
        if not self._steps.empty():
            return self._steps.get_nowait()
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._steps.get()
        except TimeoutError:
            self.close()
            raise ApiError(
                f"the request took more than the {self._timeout:g} s that the server allows: ask "
                f"for fewer tokens, or try again when the server is less busy",
                status=408,
                code="timeout",
                headers={"x-should-retry": "false"},
            ) from None

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
