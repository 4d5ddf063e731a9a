"""Runs a server until it is told to end."""

import logging
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from outrider.core.errors import OutriderError
from outrider.engine import Engine
from outrider.serve.app import create_app
from outrider.serve.limits import JsonLines
from outrider.serve.settings import ServerSettings


@dataclass(frozen=True)
class Certificate:
    """What HTTPS needs.

    Attributes:
        certfile: the certificate and those of its issuers, in PEM format.
        keyfile: the private key; None if it is in ``certfile``.
    """

    certfile: str
    keyfile: str | None = None

    def check(self) -> None:
        """Raises OutriderError for files that are missing or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        files = " and ".join(filter(None, (self.certfile, self.keyfile)))
        try:
            context.load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise OutriderError(
                f"cannot use the certificate {files}: {reason}; give a certificate in PEM format "
                f"and its key without a password"
            ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")


def run(
    engine: Engine,
    settings: ServerSettings,
    host: str,
    port: int,
    ready: Callable[[str], None] = lambda url: None,
    certificate: Certificate | None = None,
    traces_endpoint: str | None = None,
) -> None:
    """Serves an engine. SIGTERM and Ctrl-C end the server: it refuses new connections, finishes the
    requests that run, and returns.

    Args:
        engine: decodes the requests.
        settings: limits and names.
        host: the address to listen at.
        port: the port; 0 takes a free one.
        ready: called with the server's URL before it answers.
        certificate: makes the server speak HTTPS; None is HTTP.
        traces_endpoint: where traces are sent, as OTLP over HTTP; None makes none.

    Raises:
        OutriderError: the address or the certificate cannot be used, or traces cannot be made.
    """
    if certificate is not None:
        certificate.check()
    traces = None
    if traces_endpoint is not None:
        from outrider.serve.tracing import exporting_to

        traces = exporting_to(traces_endpoint)
    listener = _listen(host, port)
    timeout = settings.shutdown_timeout
    config = uvicorn.Config(
        create_app(engine, settings, traces),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=None if timeout is None else max(1, round(timeout)),
        ssl_certfile=None if certificate is None else certificate.certfile,
        ssl_keyfile=None if certificate is None else certificate.keyfile,
    )
    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again at its end
    try:
        ready(_url(listener, "http" if certificate is None else "https"))
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # the end of a server that Ctrl-C has ended
    finally:
        signal.signal(signal.SIGTERM, previous)
        listener.close()
        if traces is not None:
            traces.shutdown()  # sends what is left


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


def _url(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
