"""Keys, limits, full queues, clients that leave, timeouts, metrics and the log.

Where the order of rounds and requests matters, the test lets every step of the scheduler happen.
"""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from threading import Semaphore
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from tiny_servers import tiny_engine

from outrider import Engine, Sampling
from outrider.engine import Progress, Scheduler
from outrider.serve.app import create_app
from outrider.serve.limits import JsonLines
from outrider.serve.settings import ServerSettings

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}


class Gate:
    """Lets an engine's steps happen one by one; counts them."""

    def __init__(self, engine: Engine) -> None:
        self.allowed = Semaphore(0)
        self.num_steps = 0
        self.schedulers: list[Scheduler] = []
        make = engine.new_scheduler

        def gated() -> Scheduler:
            scheduler = make()
            step = scheduler.step

            def one_step() -> list[Progress]:
                self.allowed.acquire()
                self.num_steps += 1
                return step()

            scheduler.step = one_step  # type: ignore[method-assign]
            self.schedulers.append(scheduler)
            return scheduler

        engine.new_scheduler = gated  # type: ignore[method-assign]

    def open(self) -> None:
        """Lets all steps happen from now on."""
        self.allowed.release(1_000_000)


@asynccontextmanager
async def running(engine: Engine, **settings: Any) -> AsyncIterator[Any]:
    """An application in the test's own event loop, and a client of it that shares the loop."""
    app = create_app(engine, ServerSettings(**settings))
    async with app.router.lifespan_context(app):
        yield app


async def call(app: Any, body: dict[str, Any], leave: asyncio.Event | None = None) -> list[Any]:
    """Sends a request as a server would; what was sent back. ``leave`` disconnects the client."""
    sent: list[Any] = []
    content = json.dumps(body).encode()
    inbox = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
        "query_string": b"", "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1", "scheme": "http", "client": None, "server": None,
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


async def until(condition: Callable[[], bool]) -> None:
    """Yields to the event loop until something holds."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never holds")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows_within_a_round(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outrider.serve")

    async def run() -> None:
        engine = tiny_engine()
        gate = Gate(engine)
        async with running(engine) as app:
            leave = asyncio.Event()
            request = asyncio.create_task(call(app, BODY | {"stream": stream, "n": 3}, leave))
            gate.allowed.release(2)
            await until(lambda: gate.num_steps == 2)
            (scheduler,) = gate.schedulers
            assert scheduler.num_running == 3
            leave.set()
            await request
            assert app.state.service.num_open == 0
            (record,) = [each for each in caplog.records if each.getMessage() == "request"]
            assert json.loads(JsonLines().format(record))["disconnected"]
            gate.allowed.release(2)  # the worker may already wait for its next step
            await until(lambda: scheduler.num_running == 0)
            assert gate.num_steps <= 3
            gate.open()

    asyncio.run(run())


def test_a_request_that_waits_leaves_the_queue() -> None:
    async def run() -> None:
        engine = tiny_engine(max_batch_size=1)
        gate = Gate(engine)
        async with running(engine) as app:
            leave = asyncio.Event()
            first = asyncio.create_task(call(app, BODY))
            await until(lambda: app.state.service.num_open == 1)
            second = asyncio.create_task(call(app, BODY, leave))
            gate.allowed.release(1)
            await until(lambda: bool(gate.schedulers) and gate.schedulers[0].num_waiting == 1)
            leave.set()
            await second
            gate.open()
            (start, *_) = await first
            assert start["status"] == 200
            assert gate.schedulers[0].num_waiting == 0

    asyncio.run(run())


def test_a_full_queue_says_when_to_try_again() -> None:
    async def run() -> None:
        engine = tiny_engine(max_batch_size=2)
        gate = Gate(engine)
        async with running(engine, max_queue=1) as app:
            busy = [asyncio.create_task(call(app, BODY)) for _ in range(3)]
            await until(lambda: app.state.service.num_open == 3)
            start, content = await call(app, BODY)
            assert start["status"] == 429
            assert dict(start["headers"])[b"retry-after"] == b"1"
            assert json.loads(content["body"])["error"]["type"] == "rate_limit_error"
            too_many = await call(app, BODY | {"n": 4})
            assert too_many[0]["status"] == 400  # would never fit
            gate.open()
            assert [(await each)[0]["status"] for each in busy] == [200, 200, 200]
            assert (await call(app, BODY))[0]["status"] == 200

    asyncio.run(run())


def test_a_request_that_takes_too_long_ends_and_frees_its_row() -> None:
    async def run() -> None:
        engine = tiny_engine()
        gate = Gate(engine)
        async with running(engine, request_timeout=0.0) as app:
            start, content = await call(app, BODY)
            assert start["status"] == 408
            assert "0 s" in json.loads(content["body"])["error"]["message"]
            *_, last, _ = await call(app, BODY | {"stream": True})
            assert b"timeout" in last["body"]
            gate.open()
            await until(lambda: app.state.service.num_open == 0)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_shutdown_cuts_short_is_told(stream: bool) -> None:
    """uvicorn cancels what runs when the time for a shutdown is over."""

    async def run() -> None:
        engine = tiny_engine()
        gate = Gate(engine)
        async with running(engine) as app:
            request = asyncio.create_task(call(app, BODY | {"stream": stream}))
            await until(lambda: app.state.service.num_open == 1)
            request.cancel()
            start, *parts = await request
            assert start["status"] == (200 if stream else 503)
            assert b"shutting_down" in b"".join(each["body"] for each in parts)
            assert app.state.service.num_open == 0
            gate.open()

    asyncio.run(run())


def test_an_error_in_a_step_ends_the_requests_and_not_the_server() -> None:
    async def run() -> None:
        engine = tiny_engine()
        make, broken = engine.new_scheduler, [True]

        def breaking() -> Scheduler:
            scheduler = make()
            if broken.pop() if broken else False:
                scheduler.step = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
            return scheduler

        engine.new_scheduler = breaking  # type: ignore[method-assign]
        async with running(engine) as app:
            start, content = await call(app, BODY)
            assert start["status"] == 500
            assert "ZeroDivision" not in content["body"].decode()
            assert (await call(app, BODY))[0]["status"] == 200

    asyncio.run(run())


def test_a_running_batch_takes_newcomers_and_changes_no_output() -> None:
    """Outputs equal those alone, though requests arrive while others run and some leave."""

    async def run() -> None:
        engine, alone = tiny_engine(max_batch_size=4), tiny_engine()
        async with running(engine) as app:
            bodies = [
                BODY | {"prompt": f"f{k}", "max_tokens": 10 + 7 * k, "seed": k} for k in range(8)
            ]
            leave = asyncio.Event()
            leaver = asyncio.create_task(call(app, BODY | {"stream": True}, leave))
            tasks = [asyncio.create_task(call(app, body)) for body in bodies]
            await tasks[0]
            leave.set()
            await leaver
            for body, task in zip(bodies, tasks, strict=True):
                content = (await task)[1]["body"]
                expected = alone.generate(
                    body["prompt"],
                    Sampling(seed=body["seed"], max_new_tokens=body["max_tokens"], ignore_eos=True),
                )
                assert json.loads(content)["choices"][0]["text"] == expected.text
            assert app.state.service.num_open == 0

    asyncio.run(run())


def test_api_keys(client_of: Callable[..., TestClient]) -> None:
    client = client_of(api_keys=("one", "two"))
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}):
        response = client.get("/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    for key in ("one", "two"):
        headers = {"authorization": f"Bearer {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/version", "/metrics"):
        assert client.get(path).status_code == 200
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 401


def test_bodies_over_the_limit(client_of: Callable[..., TestClient]) -> None:
    client = client_of(max_body_bytes=1000)

    def pieces() -> Iterator[bytes]:  # without a content length
        yield b'{"prompt": "'
        yield from (b"x" * 100 for _ in range(20))
        yield b'"}'

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, pieces()):
        response = client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]
    assert client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_prompts_over_the_operators_limit(client_of: Callable[..., TestClient]) -> None:
    client = client_of(max_prompt_tokens=3)
    error = client.post(COMPLETIONS, json={"prompt": [5] * 5}).json()["error"]
    assert error["message"].startswith("the prompt has 5 tokens, and this server reads at most 3")
    assert error["param"] == "prompt"


def test_methods_of_requests_are_bounded(client_of: Callable[..., TestClient]) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    client = client_of(max_methods=1)
    assert client.post(COMPLETIONS, json=body | {"method": "suffix"}).status_code == 400
    client = client_of(max_methods=3)
    for method in ("suffix", "plain", "prompt-lookup", "block", "suffix"):
        assert client.post(COMPLETIONS, json=body | {"method": method}).status_code == 200
        assert len(client.app.state.service.pool.engines) <= 3  # type: ignore[attr-defined]


def test_methods_of_requests_are_governed_where_the_servers_is(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of(tiny_engine(γ="auto"))
    for method in ("block", "plain"):
        body = {"prompt": "x", "max_tokens": 2, "method": method}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    _, block, plain = client.app.state.service.pool.engines  # type: ignore[attr-defined]
    assert block.governor is not None
    assert plain.governor is None


def test_a_governor_that_nobody_asked_for_spares_methods_whose_outputs_depend_on_lengths(
    client_of: Callable[..., TestClient],
) -> None:
    client = client_of(tiny_engine(γ="auto-repeatable"))
    for method in ("block", "mentored", "specinfer"):
        body = {"prompt": "x", "max_tokens": 2, "method": method}
        assert client.post(COMPLETIONS, json=body).status_code == 200
    _, *others = client.app.state.service.pool.engines  # type: ignore[attr-defined]
    assert [each.length_policy for each in others] == ["auto-repeatable", None, None]


def test_a_clients_seed_has_one_output_although_lengths_are_governed(
    client_of: Callable[..., TestClient],
) -> None:
    """It is that of an engine with a fixed length; without a seed outputs differ."""
    engine = tiny_engine(γ="auto-repeatable")
    client = client_of(engine)
    body = BODY | {"max_tokens": 30, "temperature": 1.0}
    texts = [
        client.post(COMPLETIONS, json=body | own).json()["choices"][0]["text"]
        for own in ({"seed": 5}, {}, {"seed": 5}, {})
    ]
    assert texts[0] == texts[2]
    assert texts[1] != texts[3]  # equal with probability 1e-30
    sampling = Sampling(temperature=1.0, max_new_tokens=30, seed=5)
    (wanted,) = tiny_engine(γ=5).generate([BODY["prompt"]], sampling)
    assert texts[0] == wanted.text


def test_metrics(client_of: Callable[..., TestClient]) -> None:
    client = client_of(tiny_engine(max_memory="8MiB", prefix_cache="1MiB"))
    body = BODY | {"max_tokens": 30, "temperature": 0, "speculation_metrics": "summary"}
    done = client.post(COMPLETIONS, json=body).json()["metrics"]["speculative_decoding"]
    client.post(COMPLETIONS, json=body)
    text = client.get("/metrics").text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "position" not in sample.labels
    }
    assert found["vllm:spec_decode_num_drafts_total"] == 2 * done["num_spec_steps"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 2 * done["num_draft_tokens"]
    accepted = 2 * done["num_accepted_draft_tokens"]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    per_position = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    ]
    assert sum(per_position) == accepted
    assert found["vllm:generation_tokens_total"] == 60
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:prefix_cache_hits_total"] > 0
    assert 0 < found["vllm:kv_cache_usage_perc"] < 1  # the prefixes that are kept


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_is_json_without_any_text_of_users(
    client: TestClient, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="outrider.serve"):
        response = client.post(COMPLETIONS, json=BODY | {"max_tokens": 5, "stream": stream})
    (record,) = [each for each in caplog.records if each.name == "outrider.serve"]
    line = json.loads(JsonLines().format(record))
    assert line["request_id"] == response.headers["x-request-id"]
    assert line["status"] == 200
    assert line["completion_tokens"] == 5
    assert line["prompt_tokens"] > 0
    assert not line["disconnected"]
    assert "hello" not in json.dumps(line)


def test_old_objects_are_not_searched_for_garbage_while_the_server_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: seen.append(name))
    with TestClient(create_app(tiny_engine())):
        seen.append("serves")
    assert seen == ["freeze", "serves", "unfreeze"]
