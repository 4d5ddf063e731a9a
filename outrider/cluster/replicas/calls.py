"""HTTP requests and responses between processes: an ASGI application that is called from afar.

https://asgi.readthedocs.io/en/latest/specs/www.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")


@dataclass(frozen=True)
class Call:
    """A request whose body is read.

    Attributes:
        scope: ASGI's description of the request, as far as it can be sent.
        body: the whole body.
        key: of the prompt's prefix; None without a prompt.
    """

    scope: Mapping[str, Any]
    body: bytes
    key: str | None

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes, key: str | None) -> Call:
        """The call of a request."""
        kept = {name: scope[name] for name in _SCOPE if name in scope}
        kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        kept["client"] = tuple(scope["client"]) if scope.get("client") else None
        return cls(kept, body, key)


async def messages_of(app: ASGIApp, call: Call) -> AsyncGenerator[Message, None]:
    """What an application sends in response: ``http.response.start``, then the body's parts.

    Closing the generator tells the application that the client has left.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    unread = [call.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    scope = {**call.scope, "root_path": ""}

    async def respond() -> None:
        await app(scope, receive, sent.put)

    task = asyncio.create_task(respond())
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task  # raises what the application raised
    finally:
        left.set()
        await asyncio.wait([task])
