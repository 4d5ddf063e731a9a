"""What ``/openapi.json`` says of responses: their status codes, errors and media types."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    """What is wrong, as OpenAI writes it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response that is an error."""

    error: ErrorDetail


_WHEN = {
    400: "A field is wrong, unknown or not implemented; `param` names it.",
    401: "No API key, or a wrong one.",
    404: "Another model than the server's.",
    408: "The request took too long.",
    413: "The body is too large.",
    429: "The queue is full, or too many methods are in use.",
    500: "The model produced NaN, or a bug.",
    503: "Memory ran out, or the server was shut down meanwhile.",
}


def errors(*statuses: int) -> Responses:
    """The errors of a route: those with these status codes, and a missing API key."""
    return {
        status: {"model": ErrorResponse, "description": _WHEN[status]}
        for status in sorted({401, *statuses})
    }


def body_errors() -> Responses:
    """The errors of a route that reads a body."""
    return errors(400, 404, 413, 500)


def generation_responses() -> Responses:
    """The responses of a route that generates: a document, a stream of events, or an error."""
    streams = {"text/event-stream": {"schema": {"type": "string"}}}
    whole = {"description": "The answer; with `stream`, as events.", "content": streams}
    return {200: whole, **errors(*_WHEN)}


def describe(app: FastAPI) -> None:
    """Leaves out the status 422 that FastAPI documents; wrong bodies have status 400 here."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
