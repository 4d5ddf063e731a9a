"""A simulated machine for the governor: rounds take given times, and rows accept at given rates.

No model runs and no clock is read, so a simulation of thousands of rounds is exact and fast.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.reviews import MOST_REVIEWED
from outrider.engine.governor.row_memory import RowMemory
from outrider.engine.governor.sources import Sources, draft_lengths

Accepts = Callable[[int], float]
"""From a position in the draft, 1 being the first, to the probability that its token is accepted
after accepted ones."""


@dataclass
class Machine:
    """How long rounds take, in units of a target pass over few tokens.

    Attributes:
        per_token: what each token of a target pass adds.
        step: seconds of a draft step over one row.
        overhead: seconds of a round besides the models' passes.
        noise: relative standard deviation of all times.
        cold: draft steps that the first one takes besides after a round without drafts.
        slowdown: how many times as long everything takes now.
    """

    per_token: float = 0.03
    step: float = 0.1
    overhead: float = 0.1
    noise: float = 0.03
    cold: float = 0.0
    slowdown: float = 1.0

    def draft(self, rows: int, length: int, behind: int = 0) -> float:
        """Seconds in the draft model; it reads the committed tokens that it lacks at once."""
        step = self.step * (1 + self.per_token * rows)
        caught_up = self.step * self.per_token * rows * max(0, behind - 2)
        return step * length + caught_up if length else 0.0

    def review(self, rows: int, num_tokens: int) -> float:
        """Seconds in which the draft model reads so many committed tokens of each row."""
        return self.step * (1 + self.cold + self.per_token * rows * num_tokens)

    def round(self, rows: int, length: int, behind: int = 0) -> float:
        """Seconds of a round."""
        target = 1 + self.per_token * rows * (length + 1)
        return self.draft(rows, length, behind) + target + self.overhead

    def goodput(self, rows: int, length: int, accepts: Accepts) -> float:
        """Expected tokens per second of a fixed draft length."""
        tokens, alive = 1.0, 1.0
        for k in range(1, length + 1):
            alive *= accepts(k)
            tokens += alive
        return rows * tokens / self.round(rows, length)


@dataclass
class Run:
    """What a simulation gave.

    Attributes:
        asked: what the governor asked for, by round.
        tokens, seconds: of all rounds.
    """

    asked: list[Asked] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds

    def lengths(self, first: int = 0, last: int | None = None) -> list[int]:
        """The draft lengths of some rounds, probes left out."""
        return [each.length for each in self.asked[first:last] if not each.probe]


class Simulation:
    """A running batch under a governor.

    Args:
        machine: the times.
        rows: rows of the batch.
        seed: of the acceptances and the noise.
        governor: what was learned before; None begins anew.
        most: the longest draft.
        can_review: whether the draft model can be compared with what the target emitted.
    """

    def __init__(
        self,
        machine: Machine,
        rows: int,
        seed: int = 0,
        governor: Governor | None = None,
        most: int = 8,
        can_review: bool = False,
    ) -> None:
        self.governor = governor or Governor(Sources(draft_lengths(most)))
        self._batch = BatchGovernor(self.governor)
        self._machine = machine
        self._random = random.Random(seed)
        self._most = most
        self.rows = [RowMemory(False) for _ in range(rows)]
        self._can_review, self._emitted = can_review, list[list[Accepts]]()
        self._drafted = False

    def run(self, rounds: int, accepts: Sequence[Accepts] | Accepts) -> Run:
        """Runs rounds; a row's acceptance is its own, or all rows have the same."""
        each = [accepts] * len(self.rows) if callable(accepts) else list(accepts)
        run = Run()
        for _ in range(rounds):
            num = len(self.rows)
            reviewable = len(self._emitted) if self._can_review else 0
            asked = self._batch.ask(self.rows, [self._most] * num, False, reviewable)
            accepted = [self._accepted(row, asked.length) for row in each]
            reviewed = self._review() if asked.reviews else []
            self._emitted = [] if asked.length or reviewed else self._emitted
            self._emitted = [*self._emitted, each][-MOST_REVIEWED:] if not asked.length else []
            draft = self._noisy(self._drafting(asked, num))
            self._drafted = asked.length > 0
            rest = self._machine.round(num, asked.length) - self._machine.draft(num, asked.length)
            total = draft + self._noisy(rest)
            self._batch.learn(asked, self.rows, accepted, False, draft, total, reviewed=reviewed)
            run.asked.append(asked)
            run.tokens += sum(accepted) + num
            run.seconds += total
        return run

    def _drafting(self, asked: Asked, num: int) -> float:
        """Seconds of the draft model in a round."""
        if asked.reviews:
            return self._machine.review(num, asked.num_read)
        cold = 0.0 if self._drafted or not asked.length else self._machine.cold
        return cold * self._machine.step + self._machine.draft(num, asked.length, asked.behind)

    def _review(self) -> list[list[float]]:
        """By row, whether the tokens of the last rounds, which drafted nothing, would have been
        accepted."""
        return [
            [float(self._random.random() < accepts(1)) for accepts in of_row]
            for of_row in zip(*self._emitted, strict=True)
        ]

    def _accepted(self, accepts: Accepts, length: int) -> int:
        for k in range(1, length + 1):
            if self._random.random() >= accepts(k):
                return k - 1
        return length

    def _noisy(self, seconds: float) -> float:
        slow = self._machine.slowdown * max(0.5, self._random.gauss(1, self._machine.noise))
        return slow * seconds


def constant(p: float) -> Accepts:
    """The same acceptance at every position."""
    return lambda k: p
