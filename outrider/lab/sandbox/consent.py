"""The user's consent to running code that a model wrote.

Generated code runs only within :func:`allow_generated_code`: the sandbox bounds what it can do, and
whether to run it at all is the user's decision.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from outrider.core.errors import OutriderError

_ALLOWED: ContextVar[bool] = ContextVar("allowed", default=False)


class GeneratedCodeError(OutriderError):
    """Generated code would have to run, and the user has not allowed it."""


@contextmanager
def allow_generated_code() -> Iterator[None]:
    """Within this context, metrics may run generated code in the sandbox."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def require_consent() -> None:
    """Raises GeneratedCodeError outside of :func:`allow_generated_code`."""
    if not _ALLOWED.get():
        raise GeneratedCodeError(
            "this metric runs code that the model wrote, in a sandbox: allow it with "
            "--run-generated-code, or outrider.lab.sandbox.allow_generated_code()"
        )
