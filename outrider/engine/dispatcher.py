"""Several callers share one scheduler: a caller that waits for its own progress runs the steps.

A thread that wants an item of its subscription, and finds none, runs steps until there is one;
what a step did to other callers' requests is queued for them. While one thread runs a step, others
wait on a condition. No thread is needed besides the callers'. A thread that lets another one run
steps ends its OpenMP threads, which would slow down the other's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Condition, get_ident
from typing import Any, Generic, TypeVar

from outrider.engine.request import Request, Row
from outrider.engine.scheduler import Progress, Scheduler
from outrider.runtime.openmp import release_threads

T = TypeVar("T")


class Dispatcher:
    """Hands each subscription the progress of its requests.

    Args:
        new_scheduler: makes the scheduler that is shared, and one of its own for each call that a
            logits processor makes within a step, since the step waits for that call.
    """

    def __init__(self, new_scheduler: Callable[[], Scheduler]) -> None:
        self._new_scheduler = new_scheduler
        self.scheduler = new_scheduler()
        self._condition = Condition()
        self._is_stepping = False
        self._num_waiting = 0
        self._stepper: int | None = None
        self._owners: dict[int, tuple[Subscription[Any], int]] = {}
        self._progress: deque[Progress] = deque()

    def subscribe(
        self, requests: Sequence[Request], read: Callable[[Row], T | None]
    ) -> Subscription[T]:
        """Adds requests.

        Args:
            requests: the requests, in the order in which they are to be admitted.
            read: makes an item of a row after each of its rounds, or None where the subscriber
                needs none; called by the thread that ran the round.
        """
        if self.scheduler.is_stepping_here:
            return Dispatcher(self._new_scheduler).subscribe(requests, read)
        subscription = Subscription(self, read)
        with self._condition:
            for index, request in enumerate(requests):
                request_id = self.scheduler.add(request)
                self._owners[request_id] = subscription, index
                subscription.open_ids.add(request_id)
        return subscription

    def finished_rows(self, requests: Sequence[Request]) -> list[Row]:
        """Runs requests to their ends; their rows, in the same order. Longer prompts are admitted
        first, so that rows of like length are prefilled together."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        in_order = [requests[i] for i in order]
        try:
            with self.subscribe(in_order, lambda row: row if row.over else None) as subscription:
                rows = {order[index]: row for index, row in subscription}
        finally:
            release_threads()
        return [rows[i] for i in range(len(requests))]

    def rounds_of(self, request: Request, read: Callable[[Row], T]) -> Iterator[tuple[Row, T]]:
        """The row after each of its rounds, and what ``read`` made of it then; raises its error.
        The request is added when the first item is asked for."""
        try:
            with self.subscribe([request], reader(read)) as subscription:
                for _, item in subscription:
                    yield item
        finally:
            release_threads()

    def next_of(self, subscription: Subscription[T]) -> tuple[int, T] | None:
        """The subscription's next item; runs steps until there is one. None once its requests are
        over and its items are read."""
        while subscription.is_pending:
            self._step_unless_ready(subscription)
        return subscription.pop()

    def cancel(self, subscription: Subscription[T]) -> None:
        """Aborts the subscription's requests and drops its items."""
        with self._condition:
            ids = list(subscription.open_ids)
            subscription.open_ids.clear()
            subscription.items.clear()
            for request_id in ids:
                self._owners.pop(request_id, None)
            self._condition.notify_all()
        for request_id in ids:
            self.scheduler.abort(request_id)

    def _step_unless_ready(self, subscription: Subscription[T]) -> None:
        """Waits while another thread runs a step; runs one if the subscription then still has no
        item."""
        stepping = False
        try:
            with self._condition:
                while self._is_stepping and subscription.is_pending:
                    self._num_waiting += 1
                    try:
                        self._condition.wait()
                    finally:
                        self._num_waiting -= 1
                if not subscription.is_pending:
                    return
                stepping = self._is_stepping = True
            self._progress.extend(self.scheduler.step())
        finally:
            if stepping:
                if self._num_waiting or self._stepper not in (None, get_ident()):
                    release_threads()  # another thread may run the next step
                self._stepper = get_ident()
                with self._condition:
                    self._is_stepping = False
                    self._condition.notify_all()
                    self._hand_out()

    def _hand_out(self) -> None:
        """Queues the progress of requests for their subscriptions."""
        while self._progress:  # handed out twice rather than lost, if interrupted
            request_id, row = self._progress[0]
            if request_id in self._owners:
                subscription, index = self._owners[request_id]
                subscription.take(index, row)
                if row.over:
                    del self._owners[request_id]
                    subscription.open_ids.discard(request_id)
            self._progress.popleft()


class Subscription(Generic[T]):
    """The items of some requests: their indices and what ``read`` made of their rows.

    Args:
        dispatcher: hands out the items.
        read: see :meth:`Dispatcher.subscribe`.

    Attributes:
        open_ids: the requests that are not over.
        items: items that have not been read; an exception where ``read`` raised it.
    """

    def __init__(self, dispatcher: Dispatcher, read: Callable[[Row], T | None]) -> None:
        self._dispatcher = dispatcher
        self._read = read
        self.open_ids: set[int] = set()
        self.items: deque[tuple[int, T | Exception]] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether the next item depends on further steps."""
        return bool(self.open_ids) and not self.items

    def take(self, index: int, row: Row) -> None:
        """Queues the item of a row, if there is one."""
        try:
            item: T | Exception | None = self._read(row)
        except Exception as error:
            item = error
        if item is not None:
            self.items.append((index, item))

    def pop(self) -> tuple[int, T] | None:
        """The next item that is queued, if any; raises what ``read`` raised."""
        if not self.items:
            return None
        index, item = self.items.popleft()
        if isinstance(item, Exception):
            raise item
        return index, item

    def next(self) -> tuple[int, T] | None:
        """The next item; None after the last one, and once the subscription is closed."""
        return self._dispatcher.next_of(self)

    def close(self) -> None:
        """Aborts the requests that are not over. May be called from any thread."""
        self._dispatcher.cancel(self)

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter(self.next, None)

    def __enter__(self) -> Subscription[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def reader(read: Callable[[Row], T]) -> Callable[[Row], tuple[Row, T]]:
    """Makes an item of the row and what ``read`` makes of it; raises the row's error."""

    def item(row: Row) -> tuple[Row, T]:
        if row.error is not None:
            raise row.error
        return row, read(row)

    return item
