"""Runs a function on rank 0 with a sharded target, while the other ranks follow."""

from collections.abc import Callable
from typing import Any, TypeVar

from outrider.cluster.sharded.launch import Launch, check_size
from outrider.cluster.sharded.loading import load
from outrider.cluster.sharded.lockstep import Follower, leading
from outrider.cluster.sharded.ranks import TIMEOUT, joined
from outrider.engine import Engine

T = TypeVar("T")


def run(
    main: Callable[[Engine], T],
    *models: Any,
    tensor_parallel: int | None = None,
    timeout: float = TIMEOUT,
    **settings: Any,
) -> T | None:
    """Every process that ``torchrun`` started calls this.

    Args:
        main: what rank 0 does with the engine.
        models: the target, the draft and the method, as for ``sharded.load``.
        tensor_parallel: how many processes the target is to be split among; None for all.
        timeout: seconds that a process waits for another within a round.
        settings: further arguments of ``sharded.load``.

    Returns:
        What ``main`` returns, on rank 0; None elsewhere.

    Raises:
        OutriderError: as ``sharded.load`` and ``main``; RankLostError on the ranks that are left
            where one is gone.
    """
    launch = Launch.of_environment()
    check_size(tensor_parallel, launch)
    with joined(launch or Launch(0, 1, 0), timeout) as ranks:
        engine = load(ranks, *models, **settings)
        if not ranks.leads:
            Follower(ranks, engine.new_scheduler()).follow()
            return None
        with leading(ranks):
            return main(engine)
