"""Workers of a Ray cluster, through Ray Data, which schedules them and restarts those that die.

https://docs.ray.io/en/latest/data/batch_inference.html
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from outrider.cluster.batch.processes import portable
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
        OutriderError: Ray is not installed, no cluster is at that address, or Ray gives up.
        Exception: what ``start``, or a worker's function, raised in its process.
    """
    ray = connect(address)
    from ray.data import ActorPoolStrategy, DataContext, from_items

    # Ray's progress bars and logs would mix with those of the caller.
    DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = [{"number": number, "task": pickle.dumps(task)} for number, task in tasks]
    rows = from_items(items, override_num_blocks=min(len(items), _MOST_RAY_BLOCKS))
    results = rows.map_batches(
        Actor,
        fn_constructor_args=(start,),
        batch_size=1,
        compute=ActorPoolStrategy(size=num_workers),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    try:
        for row in results.iter_rows():
            result = pickle.loads(row["result"])
            if isinstance(result, Failed):
                raise result.error
            yield int(row["number"]), result
    except ray.exceptions.RayError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise OutriderError(f"Ray cannot go on: {reason}") from error


class Actor:
    """What an actor does. An exception is a result: Ray would make text of it, and start an actor
    again and again whose constructor raises.

    Args:
        start: makes the function; what it raises is the result of each task.
    """

    def __init__(self, start: Callable[[int], Callable[[T], R]]) -> None:
        self._function: Callable[[Any], Any] | None = None
        try:
            self._function = start(0)
        except Exception as error:
            self._error = portable(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        results = [pickle.dumps(self._result(pickle.loads(task))) for task in batch["task"]]
        return {"number": batch["number"], "result": np.array(results, dtype=object)}

    def _result(self, task: Any) -> Any:
        if self._function is None:
            return Failed(self._error)
        try:
            return self._function(task)
        except Exception as error:
            return Failed(portable(error))


@dataclass(frozen=True)
class Failed:
    """The result of a task whose function raised an exception."""

    error: Exception
