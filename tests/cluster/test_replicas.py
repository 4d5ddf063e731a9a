"""Replicas: which requests go to the same one, and responses that cross processes."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tiny_servers import tiny_engine

from outrider.cluster.replicas.calls import Call, messages_of
from outrider.cluster.replicas.mark import taken
from outrider.cluster.replicas.prefix import PREFIX, prefix_key, ranked
from outrider.core.errors import OutriderError
from outrider.serve import create_app

REPLICAS = ["a", "b", "c", "d", "e"]


def key(**fields: object) -> str | None:
    return prefix_key(json.dumps(fields).encode())


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]


def test_the_requests_of_a_conversation_have_one_key() -> None:
    first, later = messages("be brief", "hi"), messages("be brief", "hi", "hello", "and now?")
    other = messages("be brief", "good day")
    assert key(messages=first) == key(messages=later, temperature=0, stream=True)
    assert key(messages=first) != key(messages=other)
    assert key(input=first) == key(input=later) != key(input=other)


def test_texts_with_a_long_common_beginning_have_one_key() -> None:
    common = "x" * PREFIX
    assert key(prompt=common + "a") == key(prompt=common + "b") != key(prompt="y" + common)
    assert key(prompt=[1] * PREFIX + [2]) == key(prompt=[1] * PREFIX + [3]) != key(prompt=[2])
    assert key(prompt=[common, "other"]) == key(prompt=common)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"prompt": 3}', b"\xff"])
def test_bodies_without_a_prompt_have_none(body: bytes) -> None:
    assert prefix_key(body) is None


def test_a_replica_that_goes_moves_only_its_own_keys() -> None:
    """Of 500 keys, each of 5 replicas has 100 in the mean, with a standard deviation of 9; the
    probability that one of them has fewer than 50 or more than 150 is below 10⁻⁶."""
    keys = [str(number) for number in range(500)]
    before = {each: ranked(each, REPLICAS)[0] for each in keys}
    after = {each: ranked(each, REPLICAS[1:])[0] for each in keys}
    assert all(after[each] == before[each] for each in keys if before[each] != "a")
    counts = [list(before.values()).count(replica) for replica in REPLICAS]
    assert min(counts) > 50
    assert max(counts) < 150
    assert ranked("k", REPLICAS) == ranked("k", reversed(REPLICAS)), "the order given is no matter"


def scope(path: str, method: str = "POST") -> dict[str, Any]:
    head = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    rest = {"path": path, "raw_path": path.encode(), "query_string": b"", "client": ("c", 1)}
    return head | rest | {"method": method, "headers": [(b"content-type", b"application/json")]}


async def collected(app: Any, call: Call) -> tuple[int, bytes]:
    status, body = 0, b""
    async for message in messages_of(app, call):
        status = message.get("status", status)
        body += message.get("body", b"")
    return status, body


def test_a_call_has_the_response_of_the_server() -> None:
    app = create_app(tiny_engine())
    app.state.service.worker.start()
    fields = {"prompt": "abc", "max_tokens": 4, "seed": 1, "temperature": 0}
    body = json.dumps(fields).encode()
    try:
        call = Call.of(scope("/v1/completions"), body, prefix_key(body))
        status, answer = asyncio.run(collected(app, call))
        missing, _ = asyncio.run(collected(app, Call.of(scope("/nothing", "GET"), b"", None)))
    finally:
        assert app.state.service.worker.is_alive
        app.state.service.worker.stop()
    assert status == 200
    assert (
        json.loads(answer)["choices"][0]["text"]
        == tiny_engine().generate("abc", max_tokens_greedy()).text
    )
    assert missing == 404
    assert not app.state.service.worker.is_alive


def max_tokens_greedy() -> Any:
    from outrider import Sampling

    return Sampling(temperature=0, max_new_tokens=4)


def test_a_body_arrives_once_and_parts_are_passed_on() -> None:
    async def parts() -> Any:
        for part in (b"one", b"two"):
            yield part

    async def echo(request: Request) -> Response:
        return JSONResponse(json.loads(await request.body()))

    async def stream(request: Request) -> Response:
        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/echo", echo, methods=["POST"]), Route("/stream", stream)])
    body = b'{"a": 1}'
    assert asyncio.run(collected(app, Call.of(scope("/echo"), body, None)))[1] == b'{"a":1}'
    assert asyncio.run(collected(app, Call.of(scope("/stream", "GET"), b"", None)))[1] == b"onetwo"


def test_a_client_that_leaves_is_told_to_the_application() -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        told.append((await receive())["type"])
        told.append((await receive())["type"])

    async def leave() -> None:
        responses = messages_of(app, Call.of(scope("/"), b"x", None))
        assert (await anext(responses))["status"] == 200
        await responses.aclose()

    asyncio.run(asyncio.wait_for(leave(), 60))
    assert told == ["http.request", "http.disconnect"]


def test_an_error_of_the_application_is_raised() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(collected(app, Call.of(scope("/"), b"", None)))


class Cluster:
    """Stands in for Ray: actors with names, each of them once."""

    def __init__(self) -> None:
        self.actors: dict[str, object] = {}

    def remote(self, kind: type) -> "Cluster":
        return self

    def options(self, *, name: str, namespace: str, num_cpus: int) -> Any:
        def make() -> object:
            if name in self.actors:
                raise ValueError(f"The name {name} (namespace={namespace}) is already taken.")
            return self.actors.setdefault(name, object())

        return SimpleNamespace(remote=make)

    def kill(self, actor: object) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}


def test_a_second_server_does_not_replace_the_first_one() -> None:
    cluster = Cluster()
    with taken(cluster, "auto"):
        with (
            pytest.raises(OutriderError, match=r"another `outrider serve` .* at 'auto'.*end that"),
            taken(cluster, "auto"),
        ):
            pass
        assert cluster.actors, "the second one leaves the mark of the first one"
    with taken(cluster, "auto"):
        pass


def test_a_server_that_fails_leaves_no_mark() -> None:
    cluster = Cluster()
    with pytest.raises(ZeroDivisionError), taken(cluster, "auto"):
        raise ZeroDivisionError
    assert not cluster.actors
