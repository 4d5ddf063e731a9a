"""The replicas, and the process that HTTP reaches.

A replica is a whole server without a port. The ingress reads a request's body, so that the router
knows how the prompt begins, and passes the replica's response on, part by part.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from outrider.cluster.replicas.calls import Call, messages_of
from outrider.cluster.replicas.prefix import prefix_key
from outrider.cluster.replicas.router import PrefixRouter
from outrider.engine import Engine
from outrider.serve.app import create_app
from outrider.serve.errors import ApiError
from outrider.serve.limits import BodyLimit
from outrider.serve.run import log_to_stderr
from outrider.serve.settings import ServerSettings

APPLICATION, REPLICA = "outrider", "Replica"
NUM_INGRESSES = 2
"""Processes that read requests: with two, one of them answers while the other is restarted."""
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


@dataclass(frozen=True)
class Fleet:
    """The replicas of a server.

    Attributes:
        num_replicas: how many.
        num_cpus, num_gpus: what each reserves of the cluster.
        max_ongoing: requests that a replica works on before others get the next ones.
    """

    num_replicas: int
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_ongoing: int = 16


class Replica:
    """An engine and its server.

    Args:
        start: pickled; loads the engine.
        settings: the server's.
    """

    def __init__(self, start: bytes, settings: ServerSettings) -> None:
        make: Callable[[], Engine] = pickle.loads(start)
        log_to_stderr()
        self._app = create_app(make(), settings)
        self._worker = self._app.state.service.worker
        self._worker.start()

    async def __call__(self, call: Call) -> AsyncGenerator[Message, None]:
        """The messages of the response to a call."""
        async for message in messages_of(self._app, call):
            yield message

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose health check fails.

        Raises:
            RuntimeError: the thread of the rounds has ended, so that no request would ever end.
        """
        if not self._worker.is_alive:
            raise RuntimeError("the thread that runs the rounds has ended")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._worker.stop)


def application(start: Callable[[], Engine], settings: ServerSettings, fleet: Fleet) -> Any:
    """The application for ``serve.run``.

    Args:
        start: loads a replica's engine; pickled.
        settings: the server's, of each replica; ``max_queue`` is that of all together.
        fleet: the replicas.
    """
    replica = serve.deployment(
        name=REPLICA,
        num_replicas=fleet.num_replicas,
        max_ongoing_requests=fleet.max_ongoing,
        max_queued_requests=settings.max_queue,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.shutdown_timeout or 24 * 3600,
        ray_actor_options={"num_cpus": fleet.num_cpus, "num_gpus": fleet.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )(Replica)
    max_bytes, limit = settings.max_body_bytes, settings.max_queue + 1000

    def ingress() -> Starlette:
        return _ingress(max_bytes)

    front = serve.deployment(
        name="Ingress",
        num_replicas=NUM_INGRESSES,
        max_ongoing_requests=limit + fleet.num_replicas * fleet.max_ongoing,
        graceful_shutdown_timeout_s=settings.shutdown_timeout or 24 * 3600,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(ingress)())
    return front.bind(replica.bind(pickle.dumps(start), settings))


def _ingress(max_bytes: int) -> Starlette:
    """The application that HTTP reaches."""
    handle = serve.get_deployment_handle(REPLICA, app_name=APPLICATION).options(stream=True)

    async def forward(request: Request) -> Response:
        body = await request.body()
        responses = handle.remote(Call.of(request.scope, body, prefix_key(body)))
        try:
            begin = await anext(responses)
        except BackPressureError:
            return ApiError(
                "all replicas are busy, and no more requests may wait: try again",
                status=429,
                code="queue_full",
                headers={"Retry-After": "1"},
            ).response
        response = StreamingResponse(_body(responses), begin["status"])
        response.raw_headers = list(begin["headers"])
        return response

    return Starlette(
        routes=[Route("/{path:path}", forward, methods=_METHODS)],
        middleware=[Middleware(BodyLimit, max_bytes=max_bytes)],
    )


async def _body(responses: Any) -> AsyncIterator[bytes]:
    """The parts of a body; a client that leaves ends the request at the replica."""
    try:
        async for message in responses:
            if part := message.get("body", b""):
                yield part
    finally:
        responses.cancel()
