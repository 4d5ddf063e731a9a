"""Python's collector of cyclic garbage, beside rounds that take milliseconds and imports that make
half a million objects."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collects nothing meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Collects nothing meanwhile, for imports: what they make stays, and one collection after the
    other would go through it. Afterwards all objects count as old, so that the next collection of
    young ones does not go through them either; one of all objects comes as usual."""
    if not gc.isenabled():
        yield
        return
    with collection_paused():
        yield
        if not gc.get_freeze_count():  # else it would thaw what somebody has frozen
            gc.freeze()
            gc.unfreeze()  # to the oldest generation


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


def end_without_collection() -> None:
    """Spares the end of this process a search for garbage among all of its objects, which takes
    most of a second. Only for a process of our own: objects in a cycle are not finalized."""
    atexit.register(gc.freeze)
