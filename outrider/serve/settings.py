"""What the operator of a server decides."""

from dataclasses import dataclass
from typing import Literal

SpeculationMetrics = Literal["summary", "detailed"]


@dataclass(frozen=True)
class ServerSettings:
    """A server's limits and names.

    Attributes:
        model_name: how clients call the model; None takes the target's name.
        api_keys: the keys, one of which every request must have; empty lets everybody in.
        max_body_bytes: most bytes of a request's body.
        max_prompt_tokens: most tokens of a prompt; None sets no bound besides the context.
        max_queue: most outputs that wait for a free row; requests beyond get status 429.
        max_methods: most methods, or settings of a method, that are in use at the same time; 1
            refuses requests that choose their own.
        request_timeout: most seconds from a request's arrival to its end; None sets no bound.
        shutdown_timeout: most seconds that running requests have to end after SIGTERM; None waits
            for all of them.
        allowed_origins: origins of web pages that may call the server, such as
            ``https://chat.example.org``; ``*`` is any; empty leaves them to the browser's rule.
        stream_interval: least seconds from one chunk of a stream to the next. Tokens that arrive
            sooner share a chunk, since sending one takes about as long as a round of a tiny model.
        speculation_metrics: what responses say about speculation where requests do not choose.
    """

    model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int | None = None
    max_queue: int = 256
    max_methods: int = 4
    request_timeout: float | None = 600.0
    shutdown_timeout: float | None = 60.0
    allowed_origins: tuple[str, ...] = ()
    stream_interval: float = 0.02
    speculation_metrics: SpeculationMetrics | None = None
