"""The scheduler: requests arrive, run, and leave one by one.

Requests that one verification rule can verify share one running batch. Where a method verifies
greedy requests by another rule than sampled ones, and where a request must be decoded in order,
there is a running batch of each kind; their rounds alternate. Requests are admitted in the order
of their arrival, whatever their kind.

A step admits waiting requests to free rows, runs a bounded number of passes over the newcomers'
prompts, and then one round of one running batch. A step depends only on the requests that were
added or aborted before it: the same calls in the same order give the same outputs.
"""

import traceback
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from pathlib import Path
from threading import Lock, get_ident
from typing import NamedTuple

from outrider.core.errors import OutOfMemoryError, OutriderError, OutriderWarning
from outrider.engine.admission import KVMemory
from outrider.engine.request import Request, Row
from outrider.engine.running_batch import RunningBatch
from outrider.runtime.kv_cache.prefix import PrefixCache
from outrider.runtime.prefill import PREFILL_WIDTH

PROMPT_TOKENS_PER_STEP = 4 * PREFILL_WIDTH
"""Most prompt tokens, padding included, that a step reads while rows are running, with the target
and the draft models together. An encoder reads its source in one piece, however long it is."""


class BatchKind(NamedTuple):
    """What the rows of a running batch have in common.

    Attributes:
        in_order: whether they are decoded plainly, as their logits processors demand.
        sampled: whether they are sampled, where the method verifies greedy rows by another rule.
    """

    in_order: bool
    sampled: bool


class Progress(NamedTuple):
    """A request after one of its rounds, its last one if ``row.over``."""

    request_id: int
    row: Row


class Scheduler:
    """Runs requests in batches.

    :meth:`add` and :meth:`abort` may be called from any thread, at any time, and never wait for a
    round. :meth:`step` may be called from any thread, too; one thread at a time runs a step.

    Args:
        make_row: makes the row of a request.
        kind_of: the kind of batch that a request runs in.
        make_batch: makes an empty running batch of a kind.
        max_batch_size: most rows that run or are prefilled at the same time, of all kinds.
        memory: the bound of the KV buffers; None sets none.
        prefixes: the prefix cache, which is dropped where memory runs out; None without one.
        around_step: called before each step; the step runs within the context that it returns.
        holds_back: whether requests whose output has not begun wait for those that run to end.
    """

    def __init__(
        self,
        make_row: Callable[[Request], Row],
        kind_of: Callable[[Request], BatchKind],
        make_batch: Callable[[BatchKind], RunningBatch],
        max_batch_size: int,
        memory: KVMemory | None = None,
        prefixes: PrefixCache | None = None,
        around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
        holds_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self._around_step = around_step
        self._holds_back = holds_back
        self._make_row = make_row
        self._kind_of = kind_of
        self._make_batch = make_batch
        self._max_batch_size = max_batch_size
        self._memory = memory
        self._prefixes = prefixes
        self._new_ids = count()
        self._inbox: deque[tuple[int, Row | None]] = deque()  # a request without a row is aborted
        self._lock = Lock()
        self._thread: int | None = None
        self._rows: dict[int, Row] = {}
        self._ids: dict[Row, int] = {}
        self._waiting: dict[int, Row] = {}
        self._suspects: deque[Row] = deque()
        self._unexplained: Exception | None = None  # of a step whose rows are suspects
        self._batches: OrderedDict[BatchKind, RunningBatch] = OrderedDict()
        self._at_work: list[Row] = []  # an exception concerns these rows
        self._progress: list[Progress] = []

    @property
    def is_stepping_here(self) -> bool:
        """Whether the calling thread is inside :meth:`step`, as a logits processor is."""
        return self._thread == get_ident()

    @property
    def batches(self) -> list[RunningBatch]:
        """The running batches; none is empty."""
        return list(self._batches.values())

    @property
    def num_running(self) -> int:
        """Requests that run or are prefilled."""
        return sum(batch.num_rows for batch in self.batches)

    @property
    def is_idle(self) -> bool:
        """Whether no output has begun, nor begins in a step of another thread. An output that waits
        to be resumed has begun."""
        if self._lock.locked() and not self.is_stepping_here:
            return False
        return not self.num_running and not any(row.token_ids for row in list(self._rows.values()))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a free row, or for the next step."""
        return len(self._waiting) + sum(row is not None for _, row in list(self._inbox))

    def add(self, request: Request) -> int:
        """Queues a request for the next step; returns its id."""
        row = self._make_row(request)
        request_id = next(self._new_ids)
        self._inbox.append((request_id, row))
        return request_id

    def abort(self, request_id: int) -> None:
        """Ends a request without a result, and frees its row: at once, or after the step that
        another thread is running. Requests that are over are left as they are."""
        self._inbox.append((request_id, None))
        self._read_inbox_between_steps()

    def step(self) -> list[Progress]:
        """Runs one step; returns each request that took part in a round or failed.

        An exception in a step, such as a logits processor's, ends the request that it belongs to:
        ``row.error``. A request cannot be blamed for an exception such as KeyboardInterrupt, which
        is raised here. Either way the other requests go on from the tokens that they have.
        """
        with self._lock:
            self._thread = get_ident()
            try:
                with self._around_step():
                    progress = self._step()
            finally:
                self._thread = None
        self._read_inbox_between_steps()
        return progress

    def _step(self) -> list[Progress]:
        self._read_inbox()
        try:
            self._advance()
        except Exception as error:
            if not self._at_work:
                raise
            self._recover(error)
        except BaseException:
            self._recover(None)
            raise
        progress, self._progress = self._progress, []
        return progress

    def _advance(self) -> None:
        if self._suspects:
            self._run_alone(self._suspects.popleft())
            return
        self._admit()
        self._prefill()
        self._run_round()

    def _admit(self) -> None:
        """Begins the prefill of as many waiting rows as there are free rows and memory for."""
        if not self._waiting:
            return
        free = self._max_batch_size - sum(batch.num_rows for batch in self._batches.values())
        if not free:
            return
        for kind, rows in self._first_waiting(free + 1).items():
            batch = self._batches.get(kind) or self._make_batch(kind)
            if batch.newcomers:
                continue
            num_admitted = batch.room_for(rows, min(free, self._within_bound(rows)))
            if num_admitted:
                self._batches[kind] = batch
                self._begin(batch, rows[:num_admitted])
                free -= num_admitted
            elif not self._batches:
                assert self._memory is not None
                self._fail(rows[0], self._memory.exhausted())
            if num_admitted < len(rows) or not free:
                return  # later arrivals do not overtake a row that has to wait

    def _first_waiting(self, most: int) -> dict[BatchKind, list[Row]]:
        """The rows that have waited longest, by kind, in the order of their arrival."""
        by_kind: dict[BatchKind, list[Row]] = {}
        for row in islice(self._admissible(), most):
            by_kind.setdefault(self._kind_of(row.request), []).append(row)
        return by_kind

    def _admissible(self) -> Iterable[Row]:
        """The rows that may be admitted, in the order of their arrival."""
        rows = self._waiting.values()
        if self._batches and self._holds_back():
            return [row for row in rows if row.token_ids]
        return rows

    def _within_bound(self, rows: list[Row]) -> int:
        """How many of the rows, at least one, share passes within the bound on prompt tokens per
        step, which holds while rows are running. Passes may be narrower than those counted here,
        but more rows would all wait for the last of them."""
        widest = 0
        for number, row in enumerate(rows if self._has_running_rows else [], 1):
            length = max(len(row.request.prompt_ids), len(row.sequence_ids))
            widest = max(widest, min(length, PREFILL_WIDTH))
            if number * widest > PROMPT_TOKENS_PER_STEP:
                return max(1, number - 1)
        return len(rows)

    def _begin(self, batch: RunningBatch, rows: list[Row]) -> None:
        for row in rows:
            del self._waiting[self._ids[row]]
        self._at_work = rows
        batch.begin(rows)
        self._at_work = []

    def _prefill(self) -> None:
        """Prefills newcomers; within the bound if rows are running, which would have to wait."""
        prefilling = [batch for batch in self._batches.values() if batch.newcomers]
        bounded, used = bool(prefilling) and self._has_running_rows, 0
        for batch in prefilling:
            while newcomers := batch.newcomers:
                num_tokens = batch.prefill_tokens
                if bounded and used and used + num_tokens > PROMPT_TOKENS_PER_STEP:
                    return
                self._at_work = newcomers
                batch.prefill()
                self._at_work = []
                used += num_tokens

    def _run_round(self) -> None:
        """Runs a round of the batch whose last round is longest ago."""
        for kind, batch in self._batches.items():
            if not batch.rows:
                continue
            self._batches.move_to_end(kind)
            self._at_work = batch.rows
            batch.step()
            for row in batch.rows:
                self._report(row)
            over = batch.leave()
            self._at_work = []
            if over:
                self._drop_empty_batches()
            return

    @property
    def _has_running_rows(self) -> bool:
        return any(batch.rows for batch in self._batches.values())

    def _report(self, row: Row) -> None:
        """Notes progress for the step's caller; forgets the row if it is over."""
        request_id = self._ids[row]
        self._progress.append(Progress(request_id, row))
        if row.over:
            self._forget(request_id)

    def _fail(self, row: Row, error: Exception) -> None:
        row.error = error
        self._report(row)

    def _forget(self, request_id: int) -> None:
        del self._ids[self._rows.pop(request_id)]
        self._waiting.pop(request_id, None)

    def _drop_empty_batches(self) -> None:
        for kind in [kind for kind, batch in self._batches.items() if not batch.num_rows]:
            del self._batches[kind]

    # ------------------------------------------------------------------ arrivals and departures

    def _read_inbox(self) -> None:
        while self._inbox:
            self._take(*self._inbox[0])  # read twice rather than lost, if interrupted
            self._inbox.popleft()

    def _take(self, request_id: int, row: Row | None) -> None:
        """Lets a new row wait, or, without a row, ends the request."""
        if row is not None:
            self._rows[request_id] = self._waiting[request_id] = row
            self._ids[row] = request_id
        elif request_id in self._rows:
            self._remove(request_id)

    def _read_inbox_between_steps(self) -> None:
        """Reads the inbox unless a step is running, whose thread then reads it after the step."""
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._read_inbox()
            finally:
                self._lock.release()

    def _remove(self, request_id: int) -> None:
        row = self._rows[request_id]
        self._forget(request_id)
        if row in self._suspects:
            self._suspects.remove(row)
        for batch in self._batches.values():
            if row in batch.rows or row in batch.newcomers:
                batch.remove(row)
        self._drop_empty_batches()

    # ---------------------------------------------------------------------- after an exception

    def _recover(self, error: Exception | None) -> None:
        """Drops all batches, which an exception may have left in any state.

        A row at work that is to blame for the error fails with it. If that may be any of several
        rows, each of them first runs a round alone; if none of them fails then, a warning tells of
        the error. A row whose round cannot be repeated fails, too. All others wait to be resumed.
        Where memory ran out, nobody is to blame as long as there are prefixes to drop.
        """
        at_work, self._at_work = self._at_work, []
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # whose variables hold the KV buffers
        blamed = error is not None and not self._has_freed_memory(error)
        culprits = _culprits(error, at_work) if error is not None and blamed else []
        for row in filter(self._ids.__contains__, at_work):
            if row.over:
                self._report(row)
            elif row in culprits:
                assert error is not None
                self._fail(row, error if len(culprits) == 1 else type(error)(*error.args))
            elif row.request.sampling.in_order or not row.resumable:
                self._fail(row, _cut_short(error))
            elif blamed and not culprits:
                self._suspects.append(row)
        if blamed:
            self._unexplained = None if culprits else error
        self._start_over()

    def _has_freed_memory(self, error: Exception) -> bool:
        """Whether an error was a lack of memory that dropping prefixes may have ended."""
        no_memory = isinstance(error, OutOfMemoryError)
        return no_memory and self._prefixes is not None and self._prefixes.clear()

    def _start_over(self) -> None:
        """Drops all batches; their rows wait, in the order of their arrival."""
        for batch in self._batches.values():
            batch.close()
        self._batches.clear()
        suspects = set(self._suspects)
        self._waiting = {i: row for i, row in self._rows.items() if row not in suspects}

    def _run_alone(self, row: Row) -> None:
        """Runs one round of a row by itself, so that an exception is its own."""
        kind = self._kind_of(row.request)
        batch = self._batches[kind] = self._make_batch(kind)
        batch.room_for([row], 1)
        self._at_work = [row]
        batch.admit([row])
        batch.step()
        self._at_work = []
        self._report(row)
        self._start_over()
        if self._unexplained is not None and not self._suspects:
            _warn_of(self._unexplained)
            self._unexplained = None


def _culprits(error: Exception, at_work: list[Row]) -> list[Row]:
    """The rows that are known to have caused an error; none if it may be any of them."""
    candidates = [row for row in at_work if not row.over]
    interrupted = [row for row in candidates if not row.resumable]
    if interrupted:  # the error arose while the row took its tokens
        return interrupted
    all_did = isinstance(error, OutOfMemoryError) or len(candidates) == 1
    return candidates if all_did else []


def _warn_of(error: Exception) -> None:
    """Warns of an error of a step that did not recur when each of the step's rows ran alone: all of
    them have gone on, so no request reports it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    warnings.warn(
        f"a step failed, and its requests were run again, each without an error: "
        f"{type(error).__name__}: {error} ({Path(line.filename).name}, line {line.lineno}); the "
        f"outputs are complete, but this took time: please report it",
        OutriderWarning,
        stacklevel=2,
    )


def _cut_short(cause: Exception | None) -> OutriderError:
    error = OutriderError(
        "an exception cut a round short that cannot be repeated, as it had called logits "
        "processors with stateless=False or handed out tokens: make the request again"
    )
    error.__cause__ = cause
    return error
