"""Threads and asyncio tasks share one scheduler.

The order of threads is forced by the step that they are in, or does not matter.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Thread
from typing import Any

import pytest
from scheduled_requests import PROMPTS, alone, engine, finish, sampled
from tiny_models import greedy
from torch import Tensor

from outrider.engine.running_batch import RunningBatch
from outrider.runtime.kv_cache.cache import KVCache


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    barrier = Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(begin, calls))


def test_threads_share_one_running_batch(batches: list[RunningBatch]) -> None:
    sampling = sampled(20)
    wanted = alone(engine(), PROMPTS[:8], sampling)
    batches.clear()
    shared = engine()
    holding = shared.stream(PROMPTS[8], sampled(60))  # so that the batch is never empty
    next(holding)
    calls = [lambda p=p: shared.generate([p], sampling)[0].token_ids for p in PROMPTS[:8]]
    assert in_threads(calls) == wanted
    assert len(batches) == 1
    del holding


def test_asyncio_tasks_share_one_running_batch(batches: list[RunningBatch]) -> None:
    sampling = sampled(20)
    wanted = alone(engine(), PROMPTS[:8], sampling)
    batches.clear()
    shared = engine()

    async def output(prompt: list[int]) -> tuple[int, ...]:
        return tuple(
            [t async for event in shared.stream_async(prompt, sampling) for t in event.token_ids]
        )

    async def all_outputs() -> list[tuple[int, ...]]:
        return await asyncio.gather(*map(output, PROMPTS[:8]))

    assert asyncio.run(all_outputs()) == wanted
    assert len(batches) <= 2  # one request may be over before the others are added


def test_a_cancelled_task_ends_its_request_only() -> None:
    shared = engine()
    wanted = alone(shared, [PROMPTS[0]], sampled(30))[0]

    async def cancelled() -> None:
        async for _ in shared.stream_async(PROMPTS[1], greedy(60)):
            started.set()

    async def main() -> tuple[int, ...]:
        task = asyncio.create_task(cancelled())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        events = shared.stream_async(PROMPTS[0], sampled(30))
        return tuple([token async for event in events for token in event.token_ids])

    started = asyncio.Event()
    assert asyncio.run(main()) == wanted
    assert shared._dispatcher.scheduler.batches == []


def test_requests_are_added_and_aborted_while_another_thread_runs_a_step() -> None:
    """Neither waits for the step, which a processor holds up until they have returned."""
    shared = engine()
    wanted = alone(shared, PROMPTS[:1], sampled(20))
    in_step, go_on = Event(), Event()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        in_step.set()
        assert go_on.wait(60)
        return scores

    scheduler = shared.new_scheduler()
    held = greedy(2, processors=[processor], stateless=True)
    first = scheduler.add(shared.request(PROMPTS[1], held))
    second = scheduler.add(shared.request(PROMPTS[2], greedy(90)))
    thread = Thread(target=scheduler.step)
    thread.start()
    assert in_step.wait(60)
    third = scheduler.add(shared.request(PROMPTS[0], sampled(20)))
    scheduler.abort(second)
    scheduler.abort(first)
    go_on.set()
    thread.join()
    assert [len(batch.rows) for batch in scheduler.batches] == []
    assert tuple(finish(scheduler, 1)[third].token_ids) == wanted[0]


def test_closing_from_another_thread_wakes_the_reader() -> None:
    shared = engine()
    in_step, go_on = Event(), Event()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        in_step.set()
        assert go_on.wait(60)
        return scores

    held = greedy(9, processors=[processor], stateless=True)
    driver = shared._dispatcher.subscribe([shared.request(PROMPTS[1], held)], lambda row: row)
    reader = shared._dispatcher.subscribe([shared.request(PROMPTS[2], greedy(90))], lambda row: row)
    with ThreadPoolExecutor(2) as pool:
        driving = pool.submit(driver.next)
        assert in_step.wait(60)
        reading = pool.submit(reader.next)
        reader.close()
        assert reading.result(60) is None  # although the step goes on
        driver.close()
        go_on.set()
        assert driving.result(60) is None
    assert shared._dispatcher.scheduler.batches == []
    assert not [thing for thing in live_caches() if thing.num_rows]


def live_caches() -> Iterator[KVCache]:
    import gc

    gc.collect()
    return (thing for thing in gc.get_objects() if type(thing) is KVCache)
