"""How ``torchrun`` tells a process which rank it is. Imports torch for its errors only, so that
help pages need not."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.core.errors import RankError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A process among those that were started together.

    Attributes:
        rank: its number.
        size: how many there are.
        local_rank: its number on its machine.
    """

    rank: int
    size: int
    local_rank: int

    @staticmethod
    def of_environment() -> "Launch | None":
        """What the environment says; None where ``torchrun`` did not start the process.

        Raises:
            RankError: some of the variables are missing, or are no numbers.
        """
        missing = [name for name in _VARIABLES if name not in os.environ]
        if "RANK" in missing and "WORLD_SIZE" in missing:
            return None
        if missing:
            raise _rank_error(
                f"the environment has no {missing[0]}, which torchrun sets: start the processes "
                f"with torchrun"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            text = os.environ.get(name, os.environ["RANK"])
            if not text.isdecimal():
                raise _rank_error(f"{name}={text!r} in the environment must be a whole number")
            numbers[name] = int(text)
        return Launch(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])


def check_size(wanted: int | None, launch: Launch | None) -> None:
    """Raises RankError unless as many processes were started as the user wants.

    Args:
        wanted: processes that the target is to be split among; None for all that were started.
        launch: how this process was started.
    """
    found = 1 if launch is None else launch.size
    if wanted is not None and wanted != found:
        started = "1 was" if found == 1 else f"{found} were"
        raise _rank_error(
            f"tensor_parallel={wanted} needs {wanted} processes, and {started} started: start "
            f"torchrun --nproc-per-node {wanted}"
        )


def _rank_error(message: str) -> "RankError":
    """The error for processes that cannot work together."""
    from outrider.core.errors import RankError

    return RankError(message)
