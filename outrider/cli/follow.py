"""Runs one request until it ends or the user presses Ctrl-C, and shows its events."""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine import Engine, Event, Result
    from outrider.engine.chat import Message
    from outrider.sampling import Sampling

CANCELLED = "cancelled"


class Interrupts:
    """Lets a caller end at Ctrl-C between two rounds, where the engine can keep what it has.

    Attributes:
        deferred: whether the next Ctrl-C is noted. Any other raises KeyboardInterrupt at once.
        noted: whether one was.
    """

    def __init__(self) -> None:
        self.deferred = self.noted = False
        self._installed = False

    def __enter__(self) -> "Interrupts":
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted or not self.deferred:
            raise KeyboardInterrupt
        self.noted = True


def follow(
    engine: "Engine",
    prompt: "str | Sequence[Message]",
    sampling: "Sampling",
    show: Callable[["Event"], None] | None = None,
    *,
    add_special_tokens: bool = True,
) -> "Result":
    """Runs a request, passing each event to ``show``.

    Returns:
        The result. After Ctrl-C it holds the output so far, with ``finish_reason`` "cancelled".
    """
    row = None
    rows = engine.run(prompt, sampling, add_special_tokens=add_special_tokens)
    with Interrupts() as interrupts, closing(rows):  # type: ignore[type-var]
        try:
            for row in rows:
                if show is not None:
                    show(row.event())
                if interrupts.noted:
                    break
                interrupts.deferred = True  # a prompt that is being read has nothing to keep
        except KeyboardInterrupt:
            if row is None:
                raise
    assert row is not None
    return row.result()


def warm_up(
    engine: "Engine",
    prompt: "str | Sequence[Message]",
    sampling: "Sampling",
    *,
    add_special_tokens: bool = True,
) -> float:
    """Generates a few tokens and discards them, so that later timings exclude one-time costs.

    Returns:
        Tokens per second of the discarded output.
    """
    from dataclasses import replace

    few = replace(sampling, max_new_tokens=min(16, sampling.max_new_tokens))
    results = engine.generate([prompt], few, add_special_tokens=add_special_tokens)
    return results[0].stats.tokens_per_second
