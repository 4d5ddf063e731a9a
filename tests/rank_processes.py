"""Processes that play the ranks of a sharded run, and are used for many checks.

A fork server imports torch and transformers once; the ranks are forked from it.
"""

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from fork_server import fork_server


class RankProcesses:
    """Up to ``size`` ranks, which run one function after another.

    Args:
        size: how many processes to start.
    """

    def __init__(self, size: int) -> None:
        self._context = fork_server("rank_processes", "tiny_models")
        self._ranks = [self._start() for _ in range(size)]

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int, per_rank: Any = None
    ) -> list[Any]:
        """What a function returns, or the exception it raises, on each of the first ``size`` ranks.

        Args:
            function: at the top level of a module.
            arguments: its arguments, the same on each rank.
            size: how many ranks.
            per_rank: a list with one further argument for each rank; None for none.
        """
        port = _free_port()
        for rank in range(size):
            _, connection = self._ranks[rank]
            own = arguments if per_rank is None else (*arguments, per_rank[rank])
            connection.send((_environment(rank, size, port), function, own))
        return [self._answer(rank) for rank in range(size)]

    def kill(self, rank: int) -> None:
        """Kills a rank, which is then started anew."""
        self._ranks[rank][0].kill()

    def close(self) -> None:
        """Ends all processes."""
        for process, connection in self._ranks:
            connection.close()
            process.join(5)
            process.kill()
            process.join()

    def _answer(self, rank: int) -> Any:
        _, connection = self._ranks[rank]
        try:
            assert connection.poll(120), f"rank {rank} does not answer"
            return connection.recv()
        except EOFError:
            self._ranks[rank] = self._start()
            return "dead"

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _serve(connection: Connection) -> None:
    """What a process does: it runs the functions that it is sent."""
    torch.set_num_threads(1)
    while True:
        try:
            environment, function, arguments = connection.recv()
        except (EOFError, OSError):
            return
        os.environ.update(environment)
        try:
            answer: Any = function(*arguments)
        except Exception as error:
            answer = error
        connection.send(answer)


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(each) for name, each in numbers.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
