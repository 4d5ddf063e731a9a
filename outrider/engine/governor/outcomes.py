"""What a round is asked to draft, and what it shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core import REVIEW_WIDTH
from outrider.engine.governor.allocation import Goodput
from outrider.engine.governor.counts import Counts
from outrider.engine.governor.row_memory import RowMemory


@dataclass(slots=True)
class Asked:
    """What a round is asked to draft.

    Attributes:
        source: which of ``Sources.names``.
        length: the longest draft of any row.
        lengths: by row.
        probe: whether the length is only tried, to measure it.
        believed: what the governor expects of the round; None in the first one.
        behind: committed tokens that the draft model has to read first.
        reviews: whether the draft model is compared with the tokens that the target emitted, in a
            round without drafts (``reviews.py``).
    """

    source: int
    length: int
    lengths: Sequence[int]
    probe: bool = False
    believed: Goodput | None = None
    behind: int = 0
    reviews: bool = False

    @property
    def catches_up(self) -> bool:
        """Whether the draft model reads all that it lacks: to draft, or in a review where that is
        no more than it reads anyway."""
        return self.length > 0 or (self.reviews and self.behind <= REVIEW_WIDTH)

    @property
    def num_read(self) -> int:
        """Committed tokens of each row that the draft model reads at most."""
        return self.behind if self.catches_up else REVIEW_WIDTH

    @property
    def free_only(self) -> bool:
        """Whether the draft model is left out."""
        return self.source > 0


Label = tuple[RowMemory, Counts, int]
"""What a round showed of a row's draft: what is remembered of the row, what was accepted of the
draft, of at least one token, and the number of the round."""


@dataclass(slots=True)
class Outcome:
    """What a round showed; the other attributes are as of :meth:`BatchGovernor.learn`.

    Attributes:
        asked: what it was asked to draft.
        length: the longest draft of any row that the drafter made.
        changes: whether it drafted and the round before did not, or the other way round.
    """

    asked: Asked
    length: int
    rows: Sequence[RowMemory]
    accepted: Sequence[int | None]
    greedy: bool
    draft: float
    total: float
    forced: Sequence[int]
    changes: bool
    reviewed: Sequence[Sequence[float]] = ()
    overlaps: Sequence[Sequence[Sequence[float]]] = ()

    def labels(self, now: int) -> list[Label]:
        """What the round, whose number is ``now``, teaches of acceptance: nothing in rows that are
        over or that had forced tokens."""
        forced = self.forced or [0] * len(self.rows)
        each = zip(self.rows, self.asked.lengths, self.accepted, forced, strict=True)
        found = []
        for b, (row, length, accepted, num_forced) in enumerate(each):
            if accepted is None or not length or num_forced:
                continue
            if self.overlaps:
                draft = Counts.expected(length, *self.overlaps[b])
            else:
                draft = Counts.of(length, min(accepted, length))
            found.append((row, draft, now))
        return found
