"""Traces for OpenTelemetry: a span per request, under the names of its conventions for generative
models (https://opentelemetry.io/docs/specs/semconv/gen-ai/). No span holds any text.

Needs the extra ``otel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import propagate
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider import __version__
from outrider.core.errors import IncompatibleError
from outrider.serve.limits import OPEN_PATHS
from outrider.serve.service import Asked

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider as Exporting


class Traces:
    """Makes a span of each request that is not of the server itself. A request whose headers name
    a trace (``traceparent``) becomes a part of it.

    Args:
        app: the application behind it.
        provider: makes and exports spans.
        model_name: how clients call the model.
    """

    def __init__(self, app: ASGIApp, provider: TracerProvider, model_name: str) -> None:
        self._app = app
        self._tracer = provider.get_tracer("outrider.serve", __version__)
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        status = 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = {key.decode("latin-1"): each.decode("latin-1") for key, each in scope["headers"]}
        with self._tracer.start_as_current_span(
            scope["method"], context=propagate.extract(headers), kind=SpanKind.SERVER
        ) as span:
            try:
                await self._app(scope, receive, noted)
            finally:
                self._describe(span, scope, status)

    def _describe(self, span: Span, scope: Scope, status: int) -> None:
        path = getattr(scope.get("route"), "path", None)
        span.update_name(f"{scope['method']} {path}" if path else scope["method"])
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("http.response.status_code", status)
        if path:
            span.set_attribute("http.route", path)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        asked = scope.get("state", {}).get("asked")
        if isinstance(asked, Asked):
            is_text = path == "/v1/completions"
            span.set_attribute("gen_ai.operation.name", "text_completion" if is_text else "chat")
            span.set_attributes(_generation(asked, self._model_name))


def _generation(asked: Asked, model_name: str) -> dict[str, str | int | float | list[str]]:
    """What a span says of a generation."""
    generation = asked.generation
    sampling = generation.requests[0].sampling
    rounds = [each for choice in asked.choices for each in choice.rounds]
    told: dict[str, str | int | float | list[str]] = {
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": model_name,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.choice.count": len(asked.choices),
        "gen_ai.usage.input_tokens": asked.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(len(choice.part.token_ids) for choice in asked.choices),
        "gen_ai.response.finish_reasons": [
            choice.finish_reason or "cancelled" for choice in asked.choices
        ],
        "outrider.method": generation.engine.method.name,
        "outrider.rounds": len(rounds),
        "outrider.drafted_tokens": sum(drafted for drafted, _ in rounds),
        "outrider.accepted_tokens": sum(accepted for _, accepted in rounds),
    }
    for name in ("temperature", "top_p", "top_k"):
        if (value := getattr(sampling, name)) is not None:
            told[f"gen_ai.request.{name}"] = value
    if generation.first_round is not None:
        told["gen_ai.response.time_to_first_chunk"] = generation.first_round - generation.began
    return told


def exporting_to(endpoint: str) -> Exporting:
    """A provider whose spans go to a collector in the background, as OTLP over HTTP.

    Args:
        endpoint: where the collector takes traces, such as ``http://localhost:4318/v1/traces``.

    Raises:
        IncompatibleError: the extra ``otel`` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider as Exporting
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise IncompatibleError("traces need OpenTelemetry: pip install 'outrider[otel]'") from None
    resource = Resource.create({"service.name": "outrider", "service.version": __version__})
    provider = Exporting(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
