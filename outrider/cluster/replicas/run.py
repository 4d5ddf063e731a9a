"""Starts replicas, restarts them one by one, and ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.cluster.connection import LOCAL, connect
from outrider.cluster.replicas.deployment import APPLICATION, Fleet, application
from outrider.cluster.replicas.mark import taken
from outrider.core.errors import OutriderError
from outrider.engine import Engine
from outrider.serve.settings import ServerSettings


def run_replicas(
    start: Callable[[], Engine],
    settings: ServerSettings,
    fleet: Fleet,
    host: str,
    port: int,
    *,
    address: str = LOCAL,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves replicas of an engine until SIGTERM or Ctrl-C. SIGHUP restarts the replicas one by
    one, so that requests are answered in the meantime.

    Args:
        start: loads the engine of a replica, in the replica's process; it is pickled.
        settings: limits and names.
        fleet: the replicas.
        host, port: where to listen.
        address: of the Ray cluster; ``local`` starts Ray on this machine.
        ready: called with the URL once all replicas answer, also after each restart.

    Raises:
        OutriderError: no cluster is at that address, another server runs on it, or the replicas do
            not start.
    """
    ray = connect(address)
    from ray import serve

    asked = _Signals()
    try:
        with taken(ray, address):
            _listen(host, port)
            with asked, _ending(address):
                while asked.restart:
                    asked.restart = False
                    try:
                        app = application(start, settings, fleet)
                        serve.run(app, name=APPLICATION, route_prefix="/")
                    except RuntimeError as error:
                        raise OutriderError(
                            f"the replicas do not start: {str(error).splitlines()[0]}"
                        ) from error
                    ready(f"http://{host}:{port}")
                    asked.wait()
    except KeyboardInterrupt:
        pass  # the end of a server that Ctrl-C has ended
    finally:
        ray.shutdown()


@contextmanager
def _ending(address: str) -> Iterator[None]:
    """Ends the replicas; with them Ray Serve, if it was started here. That of a cluster may have
    other applications."""
    from ray import serve

    try:
        yield
    finally:
        if address == LOCAL:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)


def _listen(host: str, port: int) -> None:
    """Starts Ray Serve's HTTP proxy."""
    from ray import serve

    try:
        serve.start(http_options={"host": host, "port": port})
    except (RuntimeError, ValueError) as error:
        raise OutriderError(
            f"cannot listen at {host}:{port}: {str(error).splitlines()[0]}; choose another --port "
            f"or --host"
        ) from error


class _Signals:
    """Waits for signals: SIGHUP asks for a restart, SIGTERM and Ctrl-C for the end.

    Attributes:
        restart: whether the replicas are to be started, as at the beginning.
    """

    def __init__(self) -> None:
        self.restart = True
        self._came = threading.Event()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Waits for a signal."""
        while not self._came.wait(0.5):  # in pieces, so that Ctrl-C is not held up
            pass
        self._came.clear()

    def _take(self, number: int, frame: object) -> None:
        self.restart = number != signal.SIGTERM
        self._came.set()
