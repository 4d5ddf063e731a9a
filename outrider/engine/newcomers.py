"""Rows that are being prefilled: the rows' own batch until they join the running one."""

from collections.abc import Sequence
from typing import Any

from outrider.core import Context, Drafter, Ends, prompt_reader
from outrider.engine.request import Row
from outrider.runtime import HFModel
from outrider.sampling import Warp


class Newcomers:
    """Rows whose prompts are read pass by pass. A row that resumes reads its output so far, too.

    Args:
        rows: at least one.
        target: the target of the batch that they will join.
        drafter: the drafter of that batch.

    Attributes:
        rows: the rows, in the order of the context's.
        context: their tokens.
    """

    def __init__(self, rows: Sequence[Row], target: HFModel, drafter: Drafter[Any]) -> None:
        self.rows = list(rows)
        self.context = _context(rows, target)
        self._target = target
        self._drafter = drafter
        self._state: Any = None
        read = None
        if drafter.capabilities.hidden_layers:
            self._state = drafter.start(self.context)
            read = prompt_reader(drafter, self._state, self.context)
        self._prefill = target.begin(self.context, read)
        for row, reused in zip(rows, self._prefill.reused, strict=True):
            row.stats.reused = reused

    @property
    def are_cached(self) -> bool:
        """Whether the target's cache is complete, so that only the drafter has to start."""
        return self._prefill.next_width == 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the next pass, padding included; once the target's cache is complete, those
        that the drafter may have to read."""
        width = self._prefill.next_width or max(self.context.lengths) - 1
        return len(self.rows) * width

    def step(self) -> None:
        """Runs the target's next pass."""
        self._prefill.step()

    def start(self) -> tuple[Context, Any, Any]:
        """Starts the drafter unless it has read the hidden states of the prefill; returns the
        context, the target's cache and the drafter's state."""
        cache = self._prefill.finish()
        if self._state is None:
            self._state = self._drafter.start(self.context)
        return self.context, cache, self._state

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows, at least one, in this order (``rows[i] >= i``)."""
        self.rows = [self.rows[row] for row in rows]
        self._prefill.cache.keep(rows)
        if self._state is not None:
            self._state.keep(rows)
        self.context.keep(rows)
        self.context.distribution = warp_of(self.rows, self._target)


def warp_of(rows: Sequence[Row], target: HFModel) -> Warp:
    """The sampling distribution of rows."""
    samplings = [row.request.sampling for row in rows]
    return Warp(samplings, target.num_tokens, target.device)


def _context(rows: Sequence[Row], target: HFModel) -> Context:
    sequences = [row.sequence_ids for row in rows]
    most = [len(ids) + row.ending.left for ids, row in zip(sequences, rows, strict=True)]
    has_encoder = target.decoder_prompt is not None
    return Context.start(
        sequences,
        warp_of(rows, target),
        [row.request.sampling.seed for row in rows],
        [row.request.number for row in rows],
        target.device,
        [row.request.prompt_ids for row in rows] if has_encoder else None,
        Ends.of([row.ending.token_ids for row in rows], most, target.device),
        [len(row.request.first_ids) for row in rows],
        [row.request.prediction for row in rows],
    )
