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


class _Capture(local):
    kept: list[Tensor] | None = None


CAPTURE = _Capture()
"""The capture that this thread makes: ``kept`` holds the tensors that must live as long as it, and
is None where there is no capture. Rounds ask dozens of times, so that a call is too much there."""


def is_captured() -> bool:
    """Whether this thread captures the operators that it runs."""
    return CAPTURE.kept is not None


def is_recorded() -> bool:
    """Whether the operators that this thread runs are traced or captured."""
    return CAPTURE.kept is not None or is_compiling()


def keep_for_capture(tensors: Iterable[Tensor]) -> None:
    """Lets tensors that were made before live as long as the capture that this thread makes, if it
    makes one. Needed where nothing else that the capture keeps holds them, as with a cache."""
    if CAPTURE.kept is not None:
        CAPTURE.kept += tensors


@contextmanager
def capturing() -> Iterator[list[Tensor]]:
    """Says that this thread captures the operators that it runs within the context; yields the list
    of the tensors that must live as long as the capture."""
    before, CAPTURE.kept = CAPTURE.kept, []
    try:
        yield CAPTURE.kept
    finally:
        CAPTURE.kept = before
