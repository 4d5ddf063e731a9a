"""The thread that runs the rounds: whose outputs end."""

from collections.abc import Callable
from threading import Event
from typing import Any

from tiny_servers import AtOnce, tiny_engine

from outrider import Sampling
from outrider.serve.worker import Subscriber, Worker


def test_a_client_that_leaves_as_its_output_ends_ends_no_other_one() -> None:
    """The engine is idle in between, so that the other output gets the same number: the first of
    another scheduler."""
    engine, worker, end = tiny_engine(), Worker(), Event()

    def subscriber(take: Callable[[list[Any]], None]) -> Subscriber:
        request = engine.request("def f(x):", Sampling(seed=7, max_new_tokens=20, ignore_eos=True))
        return Subscriber(engine, [request], take, AtOnce())

    def leave(steps: list[Any]) -> None:
        if steps[-1].over:
            worker.submit(other)
            worker.abort(first)

    def note_end(steps: list[Any]) -> None:
        if steps[-1].over:
            end.set()

    first, other = subscriber(leave), subscriber(note_end)
    worker.start()
    worker.submit(first)
    assert end.wait(60)
    worker.stop()
    assert first.ids == other.ids
