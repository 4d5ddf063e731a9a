"""What stands before every request: API keys, the size of bodies, and the log."""

import hmac
import json
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.serve import page
from outrider.serve.errors import ApiError, api_error
from outrider.serve.metrics import Metrics
from outrider.serve.service import Asked

OPEN_PATHS = frozenset({*page.FILES, "/health", "/version", "/metrics"})
"""What can be read without an API key: nothing of it says what anybody generated."""

logger = logging.getLogger("outrider.serve")


class ApiKeys:
    """Refuses requests without one of the keys.

    Args:
        app: the application behind it.
        keys: the keys; empty lets everybody in.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            "this server wants an API key: send the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), each) for each in self._keys]
        return kind.lower() == b"bearer" and any(matches)


class BodyLimit:
    """Refuses bodies that are too large, before they are read into memory.

    Args:
        app: the application behind it.
        max_bytes: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await api_error(self._refusal).response(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise self._refusal
            return message

        await self._app(scope, limited, send)

    @property
    def _refusal(self) -> HTTPException:  # the one kind that FastAPI passes on while it reads
        return HTTPException(
            413, f"the body is larger than the {self._max_bytes} bytes that this server reads"
        )


class RequestLog:
    """Numbers, counts and logs requests; a line of the log is a JSON object.

    Args:
        app: the application behind it.
        metrics: counts the responses.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, request_id = time.perf_counter(), 0, uuid.uuid4().hex

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, numbered)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "unknown")
            self._metrics.count_response(path, status)
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": path,
                "status": status,
                "seconds": round(time.perf_counter() - began, 6),
            }
            asked = scope.get("state", {}).get("asked")
            if isinstance(asked, Asked):
                fields |= _told(asked)
            level = logging.DEBUG if path in OPEN_PATHS else logging.INFO
            logger.log(level, "request", extra={"fields": fields})


def _told(asked: Asked) -> dict[str, object]:
    """What the log says of a generation; no text."""
    rounds = [each for choice in asked.choices for each in choice.rounds]
    return {
        "decoding": asked.generation.engine.method.name,
        "prompt_tokens": asked.num_prompt_tokens,
        "completion_tokens": sum(len(choice.part.token_ids) for choice in asked.choices),
        "rounds": len(rounds),
        "drafted": sum(drafted for drafted, _ in rounds),
        "accepted": sum(accepted for _, accepted in rounds),
        "finish_reasons": [choice.finish_reason for choice in asked.choices],
        "disconnected": asked.generation.disconnected,
    }


class JsonLines(logging.Formatter):
    """A log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        } | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
