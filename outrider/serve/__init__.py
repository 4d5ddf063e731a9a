"""A server with OpenAI's HTTP interface: ``outrider serve``.

    app.py            the application: routes, error handlers, start and end
    worker.py         the thread that runs the rounds of all engines
    engines.py        an engine per method that is in use, on the same models
    generation.py     the outputs of one HTTP request, as they arrive
    completions.py    /v1/completions
    chat.py           /v1/chat/completions
    responses.py      /v1/responses
    tools/            functions that answers may call
    tracing.py        traces for OpenTelemetry
    tokens.py         /tokenize, /detokenize, /tokenizer_info
    fields.py         what requests may say, and what is refused
    limits.py         API keys, the size of bodies, the log of requests
    metrics.py        /metrics

Needs the extra ``serve``.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
    from outrider.serve.app import create_app
    from outrider.serve.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]

_HOME = {
    "ServerSettings": "outrider.serve.settings",
    "create_app": "outrider.serve.app",
}

__getattr__, __dir__ = lazy(__name__, _HOME)
