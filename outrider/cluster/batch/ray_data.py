"""Workers of a Ray cluster, through Ray Data, which schedules them and restarts those that die.

https://docs.ray.io/en/latest/data/batch_inference.html
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from outrider.cluster.connection import LOCAL, connect
from outrider.core.errors import OutriderError

T = TypeVar("T")
R = TypeVar("R")

_MOST_RAY_BLOCKS = 4096


def through_ray(
    start: Callable[[int], Callable[[T], R]],
    tasks: Iterable[tuple[int, T]],
    num_workers: int,
    *,
    address: str = LOCAL,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
) -> Iterator[tuple[int, R]]:
    """As :func:`outrider.cluster.batch.processes.in_processes`, by actors of Ray Data.

    Args:
        start: called in each actor, with 0; makes what maps tasks there.
        tasks: all of them go to Ray's object store at the start.
        num_workers: actors.
        address: of the cluster, such as ``auto`` or ``host:6379``; ``local`` starts Ray here.
        num_cpus: processors that an actor reserves.
        num_gpus: GPUs that an actor reserves.

    Raises:
        OutriderError: Ray is not installed, no cluster is at that address, or an error of a
            worker's function.
    """
    ray = connect(address)
    from ray.data import ActorPoolStrategy, DataContext, from_items

    # Ray's progress bars and logs would mix with those of the caller.
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"number": number, "task": pickle.dumps(task)} for number, task in tasks]
    rows = from_items(items, override_num_blocks=min(len(items), _MOST_RAY_BLOCKS))
    results = rows.map_batches(
        _Actor,
        fn_constructor_args=(start,),
        batch_size=1,
        compute=ActorPoolStrategy(size=num_workers),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    try:
        for row in results.iter_rows():
            yield int(row["number"]), pickle.loads(row["result"])
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from error


class _Actor:
    """What an actor does."""

    def __init__(self, start: Callable[[int], Callable[[T], R]]) -> None:
        self._function = start(0)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = [self._function(pickle.loads(task)) for task in batch["task"]]
        pickled = np.array([pickle.dumps(result) for result in results], dtype=object)
        return {"number": batch["number"], "result": pickled}


def _cause(error: Any) -> Exception:
    """The error of a worker's function inside Ray's errors."""
    cause = error
    while getattr(cause, "cause", None) is not None or cause.__cause__ is not None:
        cause = getattr(cause, "cause", None) or cause.__cause__
    if isinstance(cause, OutriderError):
        return cause
    return OutriderError(f"a worker failed: {type(cause).__name__}: {cause}")
