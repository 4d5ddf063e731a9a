"""A bounded queue between threads, in which samples make way for newer ones and orders do not."""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Any

from outrider.train.online.samples import AnySample


class Mailbox:
    """Messages in the order in which they were put.

    Args:
        most_samples: samples that it holds; of more, the oldest are dropped.

    Attributes:
        num_dropped: how many samples were dropped.
    """

    def __init__(self, most_samples: int) -> None:
        self._most = most_samples
        self._messages: deque[Any] = deque()
        self._num_samples = 0
        self._condition = Condition()
        self.num_dropped = 0

    def put(self, message: Any) -> None:
        """Adds a message; never waits."""
        with self._condition:
            self._messages.append(message)
            if isinstance(message, AnySample):
                self._num_samples += 1
                if self._num_samples > self._most:
                    self._drop_oldest_sample()
            self._condition.notify()

    def get(self, wait: bool = True) -> Any:
        """The next message; None if there is none and the caller does not wait."""
        with self._condition:
            while not self._messages:
                if not wait:
                    return None
                self._condition.wait()
            message = self._messages.popleft()
            self._num_samples -= isinstance(message, AnySample)
            return message

    def clear(self) -> None:
        """Forgets all messages."""
        with self._condition:
            self._messages.clear()
            self._num_samples = 0

    def _drop_oldest_sample(self) -> None:
        for index, message in enumerate(self._messages):
            if isinstance(message, AnySample):
                del self._messages[index]
                self._num_samples -= 1
                self.num_dropped += 1
                return
