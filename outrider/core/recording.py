"""Whether operators are recorded: traced to a program, or captured in a CUDA graph.

Code that is recorded runs once, on examples, and its operators run again on other numbers. It may
therefore neither read a number from a tensor, nor keep a tensor for later, since a captured
operator has not computed anything yet. A captured operator reads its inputs by their addresses, so
that they must live as long as the capture.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local

from torch import Tensor
from torch.compiler import is_compiling


class CaptureError(RuntimeError):
    """The code that runs cannot be captured in a CUDA graph."""


class _Thread(local):
    kept: list[Tensor] | None = None


_THREAD = _Thread()


def is_captured() -> bool:
    """Whether this thread captures the operators that it runs."""
    return _THREAD.kept is not None


def is_recorded() -> bool:
    """Whether the operators that this thread runs are traced or captured."""
    return _THREAD.kept is not None or is_compiling()


def keep_for_capture(tensors: Iterable[Tensor]) -> None:
    """Lets tensors that were made before live as long as the capture that this thread makes, if it
    makes one. Needed where nothing else that the capture keeps holds them, as with a cache."""
    if _THREAD.kept is not None:
        _THREAD.kept += tensors


@contextmanager
def capturing() -> Iterator[list[Tensor]]:
    """Says that this thread captures the operators that it runs within the context; yields the list
    of the tensors that must live as long as the capture."""
    before, _THREAD.kept = _THREAD.kept, []
    try:
        yield _THREAD.kept
    finally:
        _THREAD.kept = before
