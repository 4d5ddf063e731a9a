"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.serve.errors import api_error, shut_down
from outrider.serve.generation import Generation

DONE = "data: [DONE]\n\n"
logger = logging.getLogger("outrider.serve")


def event(document: object, name: str | None = None) -> str:
    """One event."""
    line = f"data: {json.dumps(document, separators=(',', ':'))}\n\n"
    return line if name is None else f"event: {name}\n{line}"


class Chunks:
    """The events of a stream whose documents begin with the same fields.

    Args:
        head: these fields.
    """

    def __init__(self, head: Mapping[str, object]) -> None:
        self._head = event(head).removesuffix("}\n\n")

    def event(self, more: Mapping[str, object]) -> str:
        """A document with more fields, at least one."""
        return f"{self._head},{json.dumps(more, separators=(',', ':'))[1:]}\n\n"


class EventStream(StreamingResponse):
    """A stream of events whose generation ends with it, also where the client leaves.

    Args:
        generation: produces what the events say.
        events: the events. An exception becomes the last of them.
    """

    def __init__(self, generation: Generation, events: AsyncIterator[str]) -> None:
        self._generation = generation
        self._told = False  # whether the client has had all that there is to tell
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(
            self._with_error(events), headers=headers, media_type="text/event-stream; charset=utf-8"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # a shutdown that waits no longer
            self._told = True
            last = event(shut_down().body).encode()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._generation.disconnected = not self._told
            self._generation.close()

    async def _with_error(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for each in events:
                yield each
        except Exception as error:
            told = api_error(error)
            if told.status >= 500:
                logger.exception("a stream failed")
            yield event(told.body)
        self._told = True
