"""The application: routes, error handlers, start and end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from outrider import __version__
from outrider.core.errors import OutriderError
from outrider.engine import Engine
from outrider.imports.garbage import objects_set_aside
from outrider.serve import chat, completions, methods, page, responses, tokens
from outrider.serve.documented import describe, errors
from outrider.serve.errors import ApiError, json_response, respond
from outrider.serve.limits import ApiKeys, BodyLimit, RequestLog
from outrider.serve.service import Service
from outrider.serve.settings import ServerSettings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def create_app(
    engine: Engine,
    settings: ServerSettings | None = None,
    traces: "TracerProvider | None" = None,
) -> FastAPI:
    """An ASGI application that serves an engine.

    The application's lifespan runs the engine's rounds in a thread of their own. Meanwhile nobody
    else may use the engine's models.

    Args:
        engine: decodes the requests that choose no method of their own.
        settings: limits and names.
        traces: OpenTelemetry's provider of spans; None makes none.
    """
    settings = ServerSettings() if settings is None else settings
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            with objects_set_aside():
                yield
        finally:
            service.worker.stop()

    app = FastAPI(
        title="Outrider",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these two pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    for error in (ApiError, OutriderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(error, respond)
    for module in (completions, chat, responses, tokens, methods, page):
        app.include_router(module.router)
    _add_status(app, service)
    describe(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "Retry-After"),
        )
    if traces is not None:
        from outrider.serve.tracing import Traces

        app.add_middleware(Traces, provider=traces, model_name=service.model_name)
    app.add_middleware(RequestLog, metrics=service.metrics)
    return app


def _add_status(app: FastAPI, service: Service) -> None:
    """The routes that tell of the server itself."""

    def model() -> dict[str, object]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "outrider",
            "max_model_len": service.engine.limit,
        }

    @app.get("/v1/models", responses=errors())
    async def models() -> Response:
        """The models, of which there is one."""
        return json_response({"object": "list", "data": [model()]})

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def one_model(name: str) -> Response:
        """The model of that name."""
        service.check_model(name)
        return json_response(model())

    @app.get("/health")
    async def health() -> Response:
        """Status 200 while the server answers requests."""
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        """The version of Outrider."""
        return json_response({"version": __version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:
        """Metrics in Prometheus's text format."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), media_type=kind)
