"""What tuning measures with: a machine that decodes, and what it reports of a run.

The tuner knows nothing else of models, engines and clocks. ``engine_machine.py`` is the machine
with real ones; tests simulate others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from outrider.lab.bench.record import BatchRecord
from outrider.lab.tune.quality import Quality


@dataclass(frozen=True)
class Source:
    """Where drafts come from: a method, with its draft model or head.

    Attributes:
        name: in tables and answers, such as ``head runs/eagle3``.
        method: the method with its options, as ``outrider bench`` writes it.
        draft: its draft model or head; None for a method without one.
        lengths: the draft lengths to consider, ascending. A tree has its own depth alone.
        fades: whether a drafted token is worse for being late in its draft, as with a head, which
            reads its own states there. Other sources draft the same tokens wherever a draft begins.
    """

    name: str
    method: str
    draft: str | None = None
    lengths: tuple[int, ...] = tuple(range(1, 9))
    fades: bool = False

    @property
    def longest(self) -> int:
        """The longest draft."""
        return self.lengths[-1]


PLAIN = Source("plain decoding", "plain", None, (0,))


@dataclass(frozen=True)
class Run:
    """Batches that one configuration decoded.

    Attributes:
        batches: in the order in which they ran; the requests of a batch start together.
        depths: of each batch, of each request, the length of each round's draft.
    """

    batches: tuple[BatchRecord, ...]
    depths: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds of all batches."""
        return sum(batch.seconds for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(batch.tokens for batch in self.batches)

    @property
    def round_seconds(self) -> float | None:
        """Mean seconds of a round, over the rounds in which all requests of their batch run; None
        where every batch has only one such round."""
        each = self._rounds()
        return statistics.fmean(each) if each else None

    @property
    def median_round_seconds(self) -> float | None:
        """Their median, which is that of an undisturbed round where other processes have a turn now
        and then; of plain decoding, whose rounds are alike."""
        each = self._rounds()
        return statistics.median(each) if each else None

    def _rounds(self) -> list[float]:
        found: list[float] = []
        for batch in self.batches:
            common = min(len(each.round_seconds) for each in batch.requests)
            ends = batch.requests[0].round_seconds[:common]
            found += [end - before for before, end in pairwise(ends)]
        return found

    @property
    def outside_seconds(self) -> float:
        """Mean seconds of a batch outside of its rounds: until the first one begins, mostly
        prefill, and after the last one."""
        each = self.round_seconds or 0.0
        found = []
        for batch in self.batches:
            first = batch.requests[0].round_seconds[0]
            last = max(request.round_seconds[-1] for request in batch.requests)
            found.append(max(0.0, first - each) + max(0.0, batch.seconds - last))
        return sum(found) / len(found)


@dataclass(frozen=True)
class RowRound:
    """A round of one request.

    Attributes:
        drafted: length of the draft.
        accepted: tokens of it that were emitted.
    """

    drafted: int
    accepted: int


def rounds_of(run: Run, limit: int, longest: int) -> dict[int, list[RowRound]]:
    """The rounds of each prompt that had room for a draft of full length.

    The last rounds of an output have room for a few tokens only, so their drafts are short for a
    reason that has nothing to do with the source.

    Args:
        run: with drafts of at most ``longest`` tokens.
        limit: most tokens of each output.
        longest: the draft length of the run.
    """
    found: dict[int, list[RowRound]] = {}
    for batch, depths in zip(run.batches, run.depths, strict=True):
        for request, drafted in zip(batch.requests, depths, strict=True):
            ends = [0]
            for tokens in request.round_tokens:
                ends.append(ends[-1] + tokens)
            for (before, after), depth in zip(pairwise(ends), drafted, strict=True):
                if limit - before > longest:
                    accepted = min(max(0, after - before - 1), depth)
                    found.setdefault(request.example, []).append(RowRound(depth, accepted))
    return found


class Machine(Protocol):
    """Decodes, and says how long it took."""

    @property
    def num_prompts(self) -> int:
        """The number of prompts; requests name them by their index."""

    @property
    def qualities(self) -> Mapping[str, Quality]:
        """How good the outputs of lossy sources are, by name."""

    def clock(self) -> float:
        """Seconds since some moment."""

    def pass_seconds(self, num_rows: int, width: int) -> float:
        """Seconds of a forward pass of the target over ``width`` tokens of each row."""

    def run(
        self,
        source: Source,
        length: int,
        batches: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int,
    ) -> Run:
        """Decodes batches of prompts.

        Args:
            source: of the drafts.
            length: γ.
            batches: the prompts of each batch.
            max_new_tokens: of each output.
            seed: of the sampling.

        Raises:
            OutriderError: the source does not work with the target or the prompts.
        """
