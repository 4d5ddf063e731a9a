"""Rows that are being prefilled: the rows' own batch until they join the running one."""

from collections.abc import Sequence
from typing import Any

from outrider.core import Context, Drafter, Ends, prompt_reader
from outrider.engine.request import Row
from outrider.runtime import HFModel
from outrider.runtime.kernels.truncation import truncated
from outrider.runtime.prefill import Prefilling, PrefillsInSteps, begin
from outrider.sampling import Warp


class Newcomers:
    """Rows whose prompts are read in forward passes: the target's first, then those of the
    drafter's models. A row that resumes reads its output so far, too.

    Args:
        rows: at least one.
        target: the target of the batch that they will join.
        drafter: the drafter of that batch.
        late: whether the drafter starts when it first drafts, as a ``StartsLate`` can; it is then
            left alone here.

    Attributes:
        rows: the rows, in the order of the context's: the longest first, so that those whose
            prompts are read can be left out of forward passes.
        late: as given.
        context: their tokens.
    """

    def __init__(
        self, rows: Sequence[Row], target: HFModel, drafter: Drafter[Any], *, late: bool = False
    ) -> None:
        self.rows = sorted(rows, key=lambda row: len(row.sequence_ids), reverse=True)
        self.late = late
        self.context = _context(self.rows, target)
        self._target = target
        self._drafter = drafter
        self._drafting: Prefilling | None = None
        read = None
        if drafter.capabilities.hidden_layers:
            self._drafting = begin(drafter, self.context)
            read = prompt_reader(drafter, self._drafting.state, self.context)
        self._prefill = target.begin(self.context, read)
        for row, reused in zip(self.rows, self._prefill.reused, strict=True):
            row.stats.reused = reused
        self._begin_in_steps()

    @property
    def are_ready(self) -> bool:
        """Whether everything has read the prompts."""
        if self._prefill.next_width:
            return False
        return self.late or (self._drafting is not None and self._drafting.next_width == 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that the next step reads, padding included. A drafter that does not read them in
        steps may have to read them all at once."""
        if width := self._prefill.next_width:
            return self._prefill.next_rows * width
        if not self.late:
            drafting = self._drafting
            width = max(self.context.lengths) - 1 if drafting is None else drafting.next_width
        return len(self.rows) * width

    def step(self) -> None:
        """Runs the next forward pass, or starts a drafter that does not read prompts in steps."""
        if self._prefill.next_width:
            self._prefill.step()
            self._begin_in_steps()
        elif self._drafting is None:
            self._prefill.finish()
            self._drafting = begin(self._drafter, self.context)
        else:
            self._drafting.step()

    def finish(self) -> tuple[Context, Any, Any]:
        """The context, the target's cache and the drafter's state, once all are ready. A drafter
        that starts late has none."""
        assert self.late or self._drafting is not None
        state = None if self._drafting is None else self._drafting.finish()
        return self.context, self._prefill.finish(), state

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, at least one, in this order (``rows[i] >= i``)."""
        self.rows = [self.rows[row] for row in rows]
        self._prefill.cache.keep(rows)
        if self._drafting is not None:
            self._drafting.state.keep(rows)
        self.context.keep(rows)
        self.context.distribution = warp_of(self.rows, self._target)

    def _begin_in_steps(self) -> None:
        """Begins the drafter's prefills once the target's has ended."""
        if self.late or self._drafting is not None or self._prefill.next_width:
            return
        if isinstance(self._drafter, PrefillsInSteps):
            self._prefill.finish()
            self._drafting = self._drafter.begin(self.context)


def warp_of(rows: Sequence[Row], target: HFModel) -> Warp:
    """The sampling distribution of rows."""
    samplings = [row.request.sampling for row in rows]
    on_cpu = target.device.type == "cpu"
    truncate = truncated if on_cpu and target.compiled is not None and not target.exact else None
    return Warp(samplings, target.num_tokens, target.device, truncate)


def _context(rows: Sequence[Row], target: HFModel) -> Context:
    sequences = [row.sequence_ids for row in rows]
    most = [len(ids) + row.ending.left for ids, row in zip(sequences, rows, strict=True)]
    has_encoder = target.decoder_prompt is not None
    return Context.start(
        sequences,
        warp_of(rows, target),
        [row.request.seed for row in rows],
        [row.request.number for row in rows],
        target.device,
        [row.request.prompt_ids for row in rows] if has_encoder else None,
        Ends.of([row.ending.token_ids for row in rows], most, target.device),
        [len(row.request.first_ids) for row in rows],
        [row.request.prediction for row in rows],
    )
