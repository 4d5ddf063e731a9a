"""Lockstep: all ranks run the same steps of the same requests.

Rank 0 alone takes requests. Before its scheduler takes one, ends one, or runs a step, it sends the
others what it is about to do, in the order in which it happens; they do the same on schedulers of
their own. A step depends on nothing else, since random numbers are a function of seed, request and
position, except for what rank 0 measures or reserves; that it sends as well (``engine.py``).

With each step rank 0 sends a checksum of what the last one emitted. A rank that has emitted
something else ends the run.
"""

import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from outrider.cluster.sharded.ranks import Ranks
from outrider.core.errors import InvalidParameterError, RankError, RankLostError
from outrider.engine.request import Request, Row
from outrider.engine.scheduler import Progress, Scheduler

ADD, ABORT, STEP, END = "add", "abort", "step", "end"


class LeadingScheduler(Scheduler):
    """Rank 0's scheduler, which the others follow.

    Args:
        ranks: the processes.
        parts: the arguments of :class:`Scheduler`.
    """

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks
        self._is_cut_short = False
        self.emitted = 0

    def add(self, request: Request) -> int:
        """As :meth:`Scheduler.add`.

        Raises:
            InvalidParameterError: a request that cannot be sent to the other ranks.
        """
        try:
            pickle.dumps(request)
        except Exception as error:
            raise InvalidParameterError(
                f"the request cannot be sent to the other ranks of a sharded target ({error}): its "
                f"logits processors must be picklable, such as instances of classes at the top "
                f"level of a module"
            ) from error
        return super().add(request)

    def step(self) -> list[Progress]:
        progress = super().step()
        self.emitted = checksum(progress)
        return progress

    def _take(self, request_id: int, row: Row | None) -> None:
        argument = (request_id, None if row is None else row.request)
        self._ranks.send((ABORT if row is None else ADD, argument))
        super()._take(request_id, row)

    def _advance(self) -> None:
        """As :meth:`Scheduler._advance`.

        Raises:
            RankLostError: an interrupt such as Ctrl-C has cut an earlier step short here alone.
        """
        if self._is_cut_short:
            raise RankLostError(
                "rank 0 was interrupted within a round, which the other ranks have not left: start "
                "the run again"
            )
        self._ranks.send((STEP, self.emitted))
        super()._advance()

    def _recover(self, error: Exception | None) -> None:
        """As :meth:`Scheduler._recover`, for what happens on all ranks alike."""
        if isinstance(error, RankLostError):
            self._ranks.raise_lost(error)
        self._is_cut_short |= error is None
        super()._recover(error)


class FollowingScheduler(Scheduler):
    """The scheduler of another rank."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks

    def _recover(self, error: Exception | None) -> None:
        if isinstance(error, RankLostError):
            self._ranks.raise_lost(error)
        super()._recover(error)


class Follower:
    """A rank other than 0: it does what rank 0 does.

    Args:
        ranks: the processes.
        scheduler: its own scheduler.
    """

    def __init__(self, ranks: Ranks, scheduler: Scheduler) -> None:
        self._ranks = ranks
        self._scheduler = scheduler
        self._ids: dict[int, int] = {}
        self._emitted = 0

    def follow(self) -> None:
        """Follows until rank 0 ends the run.

        Raises:
            RankLostError: another rank is gone.
            RankError: this rank has emitted other tokens than rank 0.
        """
        while True:
            verb, argument = self._ranks.receive()
            if verb == END:
                self._ranks.leave()
                return
            if verb == STEP:
                self._step(argument)
            elif verb == ADD:
                request_id, request = argument
                if request_id not in self._ids:  # sent twice if rank 0 was interrupted
                    self._ids[request_id] = self._scheduler.add(request)
            else:
                self._abort(argument[0])

    def _step(self, emitted: int) -> None:
        if emitted != self._emitted:
            raise RankError(
                f"rank {self._ranks.rank} has emitted other tokens than rank 0: the ranks must "
                f"have the same files, library versions and kind of processor"
            )
        progress = self._scheduler.step()
        self._emitted = checksum(progress)
        over = {each.request_id for each in progress if each.row.over}
        if over:
            self._ids = {ours: theirs for ours, theirs in self._ids.items() if theirs not in over}

    def _abort(self, request_id: int) -> None:
        if request_id in self._ids:
            self._scheduler.abort(self._ids.pop(request_id))


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """What rank 0 does while the others follow. At the end they are told that the run is over;
    where a rank is lost they are not, since it would never answer."""
    try:
        yield
    except RankError:
        raise
    except BaseException:
        ranks.dismiss((END, None))
        raise
    ranks.dismiss((END, None))


def checksum(progress: Sequence[Progress]) -> int:
    """A number that two ranks share if their steps have emitted the same."""
    emitted = [
        (len(row.token_ids), row.token_ids[-64:], row.ending.reason, type(row.error).__name__)
        for _, row in progress
    ]
    return zlib.crc32(repr(emitted).encode())
