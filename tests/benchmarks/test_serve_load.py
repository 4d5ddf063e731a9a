"""The load test of the server, small: streams with random cancels, each equal to itself alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from tiny_servers import tiny_engine

from benchmarks.serve_load import Report, alone, bodies, run, stream
from outrider.serve.app import create_app
from outrider.serve.run import _listen, _url


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    listener = _listen("127.0.0.1", 0)
    app = create_app(tiny_engine())
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    yield SimpleNamespace(url=_url(listener), resident=1.0)
    running.should_exit = True
    thread.join()
    listener.close()


def test_streams_equal_themselves_alone(server: Any) -> None:
    report = asyncio.run(run(server, streams=8, seconds=0.2, num_cases=10))
    assert report.failures == []
    assert report.done + report.left >= 8
    assert report.refused == 0


def test_the_load_test_notices_a_wrong_token(server: Any) -> None:
    async def compare(leave_after: int | None) -> Report:
        report = Report()
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
            right = await alone(client, *bodies(1)[0])
            wrong = replace(right, texts=("?" + right.texts[0],))
            await stream(client, right, leave_after, report)
            assert report.failures == []
            await stream(client, wrong, leave_after, report)
        return report

    for leave_after in (None, 1):
        assert len(asyncio.run(compare(leave_after)).failures) == 1


def test_growing_memory_is_noticed() -> None:
    grown = Report(resident=[(t, 100 + t / 2) for t in range(60)])
    assert grown.slope == pytest.approx(30)
    assert Report(resident=[(t, 100.0) for t in range(60)]).slope == pytest.approx(0)
