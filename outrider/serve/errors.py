"""Errors as OpenAI writes them: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import re
from collections.abc import Mapping

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.core.errors import (
    DeadEndError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    OutriderError,
    UnknownMethodError,
)

_PARAMETER = re.compile(r"^(?:option )?'?(\w+)'?(?:\[[^]]*\])*(?:=|:)")
_NAMES = {
    "max_new_tokens": "max_tokens",
    "options": "method_options",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "choice": "structured_outputs",
    "grammar": "structured_outputs",
}
_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A response that is an error.

    Args:
        message: what is wrong, and the remedy.
        status: the HTTP status code.
        param: the field of the request that is wrong, if it is one.
        code: a word for programs.
        headers: more headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, object]:
        """The JSON document."""
        kind = _TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        """The HTTP response."""
        return json_response(self.body, self.status, self.headers)


def shut_down() -> ApiError:
    """For a request that has not ended when the time for a shutdown is over."""
    return ApiError(
        "the server was shut down before the output was complete: send the request again",
        status=503,
        code="shutting_down",
    )


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A document as a response; characters beyond ASCII are escaped, so that any string fits."""
    return Response(
        json.dumps(body, separators=(",", ":")),
        status,
        dict(headers or {}),
        media_type="application/json",
    )


def api_error(error: Exception) -> ApiError:
    """What the client is told of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return ApiError(str(error.detail), status=error.status_code, headers=error.headers)
    if isinstance(error, DeadEndError):
        return ApiError(str(error), code="dead_end")
    if isinstance(error, OutOfMemoryError):
        return ApiError(str(error), status=503, code="out_of_memory")
    if isinstance(error, UnknownMethodError):
        return ApiError(str(error), param="method", code="method_not_found")
    if isinstance(error, ValueError) and isinstance(error, OutriderError):
        return ApiError(str(error), param=_param(str(error)))
    if isinstance(error, NonFiniteLogitsError):
        return ApiError(str(error), status=500, code="non_finite_logits")
    return ApiError(
        "the server failed to answer this request; its log says why",
        status=500,
        code="internal_error",
    )


async def respond(request: Request, error: Exception) -> Response:
    """The exception handler of the application."""
    if isinstance(error, RequestValidationError) and not _is_json(request):
        return ApiError(
            "the body is not declared as JSON: send the header 'Content-Type: application/json'",
            code="invalid_content_type",
        ).response
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        return _no_such_route(request, error).response
    return api_error(error).response


def _is_json(request: Request) -> bool:
    """Whether a request with a body says that it is JSON."""
    has_body = request.headers.get("content-length", "0") != "0"
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    return not has_body or kind.endswith(("/json", "+json"))


def _no_such_route(request: Request, error: HTTPException) -> ApiError:
    path = request.url.path[:200]
    what = f"there is no {path}: /openapi.json lists what there is"
    if error.status_code == 405:
        able = Headers(error.headers).get("allow", "another method")
        what = f"{path} does not take {request.method}: use {able}"
    return ApiError(what, status=error.status_code, headers=error.headers)


def _param(message: str) -> str | None:
    """The parameter that a message of the engine begins with: ``top_p=0: must be …``."""
    found = _PARAMETER.match(message)
    return None if found is None else _NAMES.get(found[1], found[1])


def _invalid(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong in a body."""
    first = error.errors()[0]
    place = [part for part in first["loc"] if part not in ("body", "query", "path")]
    what = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(
            f"the body is no valid JSON: {reason} at character {place[0] if place else 0}",
            code="invalid_json",
        )
    if not place:
        param = _param(what)
        return ApiError(what if param else f"the body is not as expected: {what}", param=param)
    name = str(place[0])
    if first["type"] == "missing":
        return ApiError(f"{_dotted(place)}: the field is missing", param=name)
    if first["type"] == "extra_forbidden":
        where = _dotted(place)
        return ApiError(f"{where}: there is no such field", param=where, code="unknown_field")
    return ApiError(f"{_dotted(place)}: {what}", param=name)


def _dotted(place: list[object]) -> str:
    """``["messages", 0, "role"]`` as ``messages[0].role``."""
    name = ""
    for part in place:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name
