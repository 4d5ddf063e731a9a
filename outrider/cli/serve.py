"""``outrider serve``: a server with OpenAI's HTTP interface."""

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import typer

from outrider.cli.configuration import Config, configured
from outrider.cli.engines import open_engine, public_name, require_draft_of
from outrider.cli.errors import fail, say
from outrider.cli.options.models import EMBEDDED, MaxMemory, Models, PrefixCache
from outrider.cli.options.sampling import NoGenerationConfig
from outrider.cli.options.server import Limits, Listening, ModelArgument, Replicas
from outrider.cli.options.speculation import Speculation
from outrider.cli.replicas import ServedEngine, serve_replicas
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.serve.run import Certificate
    from outrider.serve.settings import ServerSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    context: typer.Context,
    model: ModelArgument = None,
    *,
    listening: Listening,
    limits: Limits,
    replicas: Replicas,
    models: Models,
    max_memory: MaxMemory = None,
    prefix_cache: PrefixCache = "512MiB",
    speculation: Speculation,
    no_generation_config: NoGenerationConfig = False,
    config: Config = None,
) -> None:
    """Serve a model over OpenAI's HTTP interface. The log goes to stderr, a JSON object per line.

    Ctrl-C or SIGTERM ends the server: it finishes the requests that run. Serve the embedded pair:

      outrider serve

    Serve a chat model; copied drafts need no draft model:

      outrider serve HuggingFaceTB/SmolLM2-135M-Instruct --method suffix

    Requests may choose a method and more; docs/serve.md lists the fields. Serve two engines on
    Ray Serve; SIGHUP then restarts them one by one:

      outrider serve --replicas 2
    """
    models = _with_target(models, model)
    models, speculation, tuned = configured(context, models, speculation, config, None)
    require_draft_of(speculation.method, models)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise fail(f"outrider serve needs {missing[0]}: pip install 'outrider[serve]'")
    start("outrider.serve.run", compiles=models.compiles)
    from outrider.serve.run import log_to_stderr, run

    certificate = _certificate(listening)
    settings = _settings(listening, limits, models.target)
    loading = ServedEngine(
        models,
        speculation,
        limits.max_batch_size,
        max_memory,
        prefix_cache,
        not no_generation_config,
        limits.max_methods,
    )
    loading.check()
    if tuned is not None:
        tuned.note_sampling(None)
    if replicas.replicas is not None:
        serve_replicas(loading, settings, listening, limits, replicas)
        return
    engine = open_engine(models, speculation, **loading.limits(), background=True)
    if listening.host not in _LOCAL and not settings.api_keys:
        say(f"note: anybody who reaches {listening.host} can use this server: set --api-key")
    log_to_stderr()

    def ready(url: str) -> None:
        by = f"{settings.model_name} by method {engine.method.name}"
        say(f"serving {by} at {url}/v1: Ctrl-C ends the server")

    run(
        engine,
        settings,
        listening.host,
        listening.port,
        ready,
        certificate,
        listening.otlp_traces_endpoint,
    )


def _certificate(listening: Listening) -> "Certificate | None":
    from outrider.serve.run import Certificate

    if listening.ssl_certfile is None:
        if listening.ssl_keyfile is not None:
            raise fail("--ssl-keyfile without its certificate: set --ssl-certfile, too")
        return None
    certificate = Certificate(listening.ssl_certfile, listening.ssl_keyfile)
    certificate.check()
    return certificate


def _origins(given: list[str] | None) -> tuple[str, ...]:
    """Origins as browsers write them: a scheme, a host, and perhaps a port."""
    for each in given or ():
        parts = urlsplit(each)
        is_origin = bool(parts.netloc) and each == f"{parts.scheme}://{parts.netloc}"
        if each != "*" and not is_origin:
            raise fail(
                f"--allowed-origins {each!r}: must be * or a scheme and a host, such as "
                f"https://chat.example.org"
            )
    return tuple(given or ())


def _with_target(models: Models, model: str | None) -> Models:
    """The models, the target named as an argument or by its option."""
    if model is None:
        return models
    if models.target not in (EMBEDDED, model):
        raise fail(f"MODEL {model} and --target {models.target}: name the target once")
    return replace(models, target=model)


def _settings(listening: Listening, limits: Limits, target: str) -> "ServerSettings":
    from outrider.engine.admission import parse_bytes
    from outrider.serve.settings import ServerSettings

    wanted = listening.speculation_metrics
    if wanted not in (None, "summary", "detailed"):
        raise fail(f"--speculation-metrics {wanted!r}: must be summary or detailed")
    if listening.api_key is not None and not all(listening.api_key):
        raise fail("--api-key '': an empty key lets everybody in: leave the option out instead")
    return ServerSettings(
        model_name=listening.served_model_name or public_name(target),
        api_keys=tuple(listening.api_key or ()),
        max_body_bytes=parse_bytes(limits.max_body_size, "max_body_size"),
        max_prompt_tokens=limits.max_prompt_tokens,
        max_queue=limits.max_queue,
        max_methods=limits.max_methods,
        request_timeout=limits.request_timeout or None,
        shutdown_timeout=limits.shutdown_timeout or None,
        stream_interval=limits.stream_interval,
        allowed_origins=_origins(listening.allowed_origins),
        speculation_metrics=cast("Any", wanted),
    )
