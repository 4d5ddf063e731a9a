"""Python's collector of cyclic garbage, beside rounds that take milliseconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def objects_set_aside() -> Iterator[None]:
    """Keeps the collector from the objects that there are. A process that has compiled programs has
    millions of them, and a full collection in the middle of an output took two seconds. Does
    nothing where objects are set aside already."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
