"""Collects samples from an engine's rounds: of rows chosen by a bound on tokens per second, what a
recorder takes of each verified position.

The verified positions of a round are those of the accepted tokens and of the first rejected one.
The position of a bonus token, where nothing was drafted, is none; positions after a rejected token
have a context that was never emitted. A head reads the hidden states of all tokens in turn, so its
recorder keeps the position of the bonus token, too.

Legend: B rows, N nodes of a path, D drafted positions, R recorded rows, P positions, K top tokens,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Round
from outrider.engine.request import Row
from outrider.engine.round_observer import RowRound
from outrider.train.online.samples import Sample

S = TypeVar("S")
Made = TypeVar("Made", covariant=True)


class Recorder(Protocol[Made]):
    """What is kept of each verified position, and the samples that are made of it.

    :class:`TopKRecorder` keeps the target's distributions. The recorder of a head
    (``eagle3_head.py``) keeps the hidden states at the same nodes beside them.
    """

    def num_positions(self, done: RowRound) -> int:
        """How many positions of a round are kept, from the root's on."""

    def blocks(self, round_: Round, rows_R: Tensor, path_RN: Tensor) -> list[Tensor]:
        """Numbers of the rows' positions, each (R, positions · numbers of one), still on the
        device. Must not wait for it.

        Args:
            round_: the round.
            rows_R: the recorded rows.
            path_RN: the root and the nodes along the accepted path, N = D + 1; nodes after the
                first rejected position are arbitrary.
        """

    def positions(self, line: Sequence[list[float]], num: int) -> list[Any]:
        """What is kept of a row's first ``num`` positions, from its line of the blocks."""

    def sample(
        self, tokens: Sequence[int], positions: Sequence[int], kept: Sequence[Any]
    ) -> Made | None:
        """A sample: tokens, indices of the positions among them, and what was kept of each. None
        where nothing can be learned from them."""


class TopKRecorder:
    """Keeps the target's k most probable tokens and their log-probabilities.

    Args:
        top_k: k.
        num_tokens: V, the tokens that the draft model has; the target's probabilities are divided
            among them.
    """

    def __init__(self, top_k: int, num_tokens: int) -> None:
        self.top_k = min(top_k, num_tokens)
        self.num_tokens = num_tokens

    def num_positions(self, done: RowRound) -> int:
        return done.num_verified

    def blocks(self, round_: Round, rows_R: Tensor, path_RN: Tensor) -> list[Tensor]:
        logits_BNV = round_.scores.logits_BNV[..., : self.num_tokens]
        logits_RDV = logits_BNV[rows_R[:, None], path_RN[:, :-1]].float()
        top = logits_RDV.topk(self.top_k, dim=-1)
        log_p_RDK = top.values - logits_RDV.logsumexp(-1, keepdim=True)
        return [log_p_RDK.flatten(1), top.indices.flatten(1)]

    def positions(self, line: Sequence[list[float]], num: int) -> list[Any]:
        K, (log_p, ids) = self.top_k, line
        return [(log_p[i * K : (i + 1) * K], ids[i * K : (i + 1) * K]) for i in range(num)]

    def sample(
        self, tokens: Sequence[int], positions: Sequence[int], kept: Sequence[Any]
    ) -> Sample:
        return Sample(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor([ids for _, ids in kept]).to(torch.int32),
            torch.tensor([log_p for log_p, _ in kept], dtype=torch.float32),
            self.num_tokens,
        )


class RateLimit:
    """Admits rows while the positions recorded so far are within a rate, up to a burst of ten
    seconds.

    Args:
        per_second: positions per second, in the long run.
        clock: seconds that have passed.
    """

    BURST = 10.0

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._balance, self._then = per_second * self.BURST, clock()

    def admits(self) -> bool:
        """Whether another row may be recorded."""
        now = self._clock()
        more = (now - self._then) * self._per_second
        self._balance, self._then = min(self._balance + more, self._per_second * self.BURST), now
        return self._balance > 0

    def spend(self, num: int) -> None:
        """Counts recorded positions."""
        self._balance -= num


@dataclass
class _Pending:
    """What has been recorded of a row and is in no sample yet."""

    positions: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class Collector(Generic[S]):
    """Turns rounds into samples. A row is recorded from its first round on, or not at all.

    Args:
        recorder: what is kept of each position.
        put: takes a finished sample.
        limit: which rows are recorded.
        span: positions of a sample, about; the last sample of an output has fewer.
        context: tokens before the first position that a sample has, at most.

    Attributes:
        num_positions: positions in samples so far.
    """

    def __init__(
        self,
        recorder: Recorder[S],
        put: Callable[[S], None],
        limit: RateLimit,
        span: int,
        context: int,
    ) -> None:
        self._recorder, self._put, self._limit = recorder, put, limit
        self._span, self._context = span, context
        self._rows: WeakKeyDictionary[Row, _Pending | None] = WeakKeyDictionary()
        self.num_positions = 0

    def blocks(self, round_: Round, rows: Sequence[Row]) -> list[Tensor]:
        """The numbers of a round to copy to the host, each (B, ·); those of rows that are not
        recorded are 0."""
        for row in rows:
            if row not in self._rows:
                self._rows[row] = _Pending() if self._limit.admits() else None
        recorded = [b for b, row in enumerate(rows) if self._rows[row] is not None]
        num_drafted = round_.verdict.path_BD.shape[1]
        if not recorded or not num_drafted:
            return []
        rows_R = torch.tensor(recorded, device=round_.emitted_BK.device)
        path_RN = pad(round_.verdict.path_BD[rows_R], (1, 0))
        blocks = self._recorder.blocks(round_, rows_R, path_RN)
        if len(recorded) == len(rows):
            return blocks
        return [x.new_zeros(len(rows), x.shape[1]).index_copy(0, rows_R, x) for x in blocks]

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        """Takes over a row's numbers of the blocks."""
        pending = self._rows.get(done.row)
        if pending is None:
            return
        num = self._recorder.num_positions(done) if line else 0
        if num:
            self._limit.spend(num)
            pending.positions += range(done.start, done.start + num)
            pending.kept += self._recorder.positions(line, num)
        if pending.positions and (len(pending.positions) >= self._span or done.row.over):
            self._rows[done.row] = _Pending()
            self._finish(done.row, pending)

    def _finish(self, row: Row, pending: _Pending) -> None:
        first = max(0, pending.positions[0] - self._context)
        tokens = row.sequence_ids[first : pending.positions[-1] + 1]
        positions = [position - first for position in pending.positions]
        with torch.inference_mode(False):  # rounds run in it, and samples need gradients
            sample = self._recorder.sample(tokens, positions, pending.kept)
        if sample is not None:
            self.num_positions += len(positions)
            self._put(sample)
