"""Marks a cluster as taken by a server, so that another server does not replace its application.

Applications of a cluster share one HTTP address, so a cluster runs one server at a time. The mark
is an actor with a name, which Ray ends with the process that made it, however that ends: the
application of a server that was killed can be replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.cluster.connection import LOCAL
from outrider.core.errors import OutriderError

NAME = "outrider-server"


class ServerMark:
    """The actor; it does nothing."""


@contextmanager
def taken(ray: Any, address: str) -> Iterator[None]:
    """Keeps other servers from a cluster.

    Args:
        ray: connected to the cluster.
        address: of the cluster.

    Raises:
        OutriderError: another server runs on the cluster.
    """
    marking = ray.remote(ServerMark).options(name=NAME, namespace=NAME, num_cpus=0)
    try:
        mark = marking.remote()
    except ValueError as error:  # the name is taken
        raise OutriderError(
            f"another `outrider serve` runs on the Ray cluster at {address!r}, and this one would "
            f"replace it: end that one first, or use another cluster, such as --ray {LOCAL}"
        ) from error
    try:
        yield
    finally:
        ray.kill(mark)
