"""The Ray cluster that a command runs on."""

from __future__ import annotations

import logging
from typing import Any

from outrider.core.errors import OutriderError

LOCAL = "local"
"""The address that starts Ray on this machine."""


def connect(address: str) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: such as ``auto`` or ``host:6379``; ``local`` starts Ray on this machine.

    Raises:
        OutriderError: Ray is not installed, or there is no cluster at that address.
    """
    ray = require_ray()
    if ray.is_initialized():
        return ray
    own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # Ray raises a plain Exception where its processes do not start
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OutriderError(
            f"no Ray cluster at {address!r} ({reason}): start one by `ray start --head`, or use "
            f"--ray {LOCAL}"
        ) from error
    return ray


def require_ray() -> Any:
    """Ray.

    Raises:
        OutriderError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise OutriderError(
            f"Ray needs {error.name}: pip install 'outrider[cluster]', or run without Ray"
        ) from error
    return ray
