"""Whether operators are recorded: traced to a program, or captured in a CUDA graph.

Code that is recorded runs once, on examples, and its operators run again on other numbers. It may
therefore neither read a number from a tensor, nor keep a tensor for later, since a captured
operator has not computed anything yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local

import torch


class CaptureError(RuntimeError):
    """The code that runs cannot be captured in a CUDA graph."""


class _Thread(local):
    captures = False


_THREAD = _Thread()


def is_captured() -> bool:
    """Whether this thread captures the operators that it runs."""
    return _THREAD.captures


def is_recorded() -> bool:
    """Whether the operators that this thread runs are traced or captured."""
    return _THREAD.captures or torch.compiler.is_compiling()


@contextmanager
def capturing() -> Iterator[None]:
    """Says that this thread captures the operators that it runs within the context."""
    before, _THREAD.captures = _THREAD.captures, True
    try:
        yield
    finally:
        _THREAD.captures = before
