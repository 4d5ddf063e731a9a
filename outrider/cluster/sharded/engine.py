"""An engine whose target is sharded, and whose ranks decide alike."""

from collections.abc import Sequence
from typing import Any, NoReturn

from outrider.cluster.sharded.lockstep import FollowingScheduler, LeadingScheduler
from outrider.cluster.sharded.ranks import Ranks
from outrider.core.errors import IncompatibleError, RankError
from outrider.engine import Engine
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.request import Row
from outrider.engine.running_batch import RunningBatch
from outrider.engine.scheduler import BatchKind, Scheduler


class ShardedEngine(Engine):
    """As :class:`Engine`. On rank 0 it takes requests; on other ranks a ``Follower`` runs it.

    Args:
        ranks: the processes.
        parts: arguments of :class:`Engine`.
        settings: further arguments of :class:`Engine`.
    """

    def __init__(self, ranks: Ranks, *parts: Any, **settings: Any) -> None:
        self.ranks = ranks
        self._scheduler: Scheduler | None = None
        super().__init__(*parts, **settings)

    def new_scheduler(self) -> Scheduler:
        """The scheduler that all ranks run. There is one only, which a server and the engine's own
        calls share, since the other ranks follow one.

        Raises:
            IncompatibleError: a logits processor asks for a scheduler within a step.
        """
        if self._scheduler is None:
            self._scheduler = self._make_scheduler()
        elif self._scheduler.is_stepping_here:
            raise self._alone("a call that a logits processor makes")
        return self._scheduler

    def _make_scheduler(self) -> Scheduler:
        kind = LeadingScheduler if self.ranks.leads else FollowingScheduler
        return kind(
            self.ranks,
            self._builder.row,
            self._kind_of,
            self._new_batch,
            self.max_batch_size,
            self._memory,
            self.prefixes,
        )

    def with_method(self, *parts: Any, **settings: Any) -> NoReturn:
        """Not available: raises IncompatibleError."""
        raise self._alone("an engine of another method")

    def adapt(self, *parts: Any, **settings: Any) -> NoReturn:
        """Not available: raises IncompatibleError."""
        raise self._alone("a draft model that adapts")

    def adopt_draft(self, draft: Any) -> NoReturn:
        """Not available: raises IncompatibleError."""
        raise self._alone("another draft model")

    def _alone(self, what: str) -> IncompatibleError:
        return IncompatibleError(
            f"a sharded target cannot have {what} while it runs: start another run"
        )

    def _new_batch(self, kind: BatchKind) -> RunningBatch:
        return AgreeingBatch(self.ranks, *self._batch_parts(kind))

    def _governor_of_batch(self) -> BatchGovernor:
        assert self.governor is not None
        return AgreeingGovernor(self.ranks, self.governor)


class AgreeingBatch(RunningBatch):
    """A running batch that admits as many rows as rank 0 does.

    Args:
        ranks: the processes.
        parts: arguments of :class:`RunningBatch`.
    """

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        super().__init__(*parts)
        self._ranks = ranks
        self._is_bounded = self._reservation is not None

    def room_for(self, waiting: Sequence[Row], most: int) -> int:
        """As rank 0 decides.

        Raises:
            RankError: this rank has less memory for KV buffers.
        """
        if not self._is_bounded:
            return super().room_for(waiting, most)
        if self._ranks.leads:
            return int(self._ranks.agree(super().room_for(waiting, most)))
        wanted = int(self._ranks.receive())
        found = super().room_for(waiting, wanted) if wanted else 0
        if found < wanted:
            raise RankError(
                f"rank {self._ranks.rank} has room for {found} rows where rank 0 has room for "
                f"{wanted}: give all ranks the same max_memory"
            )
        return wanted


class AgreeingGovernor(BatchGovernor):
    """A governor that drafts what rank 0's would, whose clock alone counts.

    Args:
        ranks: the processes.
        governor: what the engine has learned.
    """

    def __init__(self, ranks: Ranks, governor: Governor) -> None:
        super().__init__(governor)
        self._ranks = ranks

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        asked: Asked = self._ranks.agree(super().ask(rows, limits, greedy, reviewable))
        return asked

    def reads_prompts(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, num_tokens: int
    ) -> bool:
        reads: bool = self._ranks.agree(super().reads_prompts(rows, limits, greedy, num_tokens))
        return reads
