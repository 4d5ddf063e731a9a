"""Runs a server until it is told to end."""

import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from outrider.core.errors import OutriderError
from outrider.engine import Engine
from outrider.serve.app import create_app
from outrider.serve.limits import JsonLines
from outrider.serve.settings import ServerSettings


def run(
    engine: Engine,
    settings: ServerSettings,
    host: str,
    port: int,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves an engine. SIGTERM and Ctrl-C end the server: it refuses new connections, finishes the
    requests that run, and returns.

    Args:
        engine: decodes the requests.
        settings: limits and names.
        host: the address to listen at.
        port: the port; 0 takes a free one.
        ready: called with the server's URL before it answers.

    Raises:
        OutriderError: the address cannot be used.
    """
    listener = _listen(host, port)
    timeout = settings.shutdown_timeout
    config = uvicorn.Config(
        create_app(engine, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=None if timeout is None else max(1, round(timeout)),
    )
    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at its end
    try:
        ready(_url(listener))
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # the end of a server that Ctrl-C has ended
    finally:
        signal.signal(signal.SIGTERM, previous)
        listener.close()


def log_to_stderr(level: int = logging.INFO) -> None:
    """Writes the server's log to stderr, a JSON object per line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("outrider.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise OutriderError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --port or "
            f"--host"
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
