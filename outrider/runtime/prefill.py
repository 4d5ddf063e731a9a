"""Prefill: the prompts of a batch enter the KV cache, in forward passes of bounded width.

A caller may do other work between two forward passes; the tokens per pass, and so every bit of the
result, stay the same. They depend on what is known at the beginning alone: rows that leave
meanwhile do not make the passes of the others wider.

On a CPU the rows share the tokens of a pass, as many as a compiled program takes. It computes the
logits of the last token alone; programs of models that cannot choose compute all of them, which
pays for short prompts only (``runner.py``). On other devices passes over several rows are wider.

Rows whose prompts are read take no further part where none that is longer comes after them. So the
caller gives the longest first.

Legend: B rows, N query tokens, T context length, H hidden width (times the layers asked for).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import pad

from outrider.core.chain import cached_arange
from outrider.core.context import Context
from outrider.core.lengths import Lengths
from outrider.core.protocols import Drafter, ReadHidden
from outrider.runtime.executors.compiled import MOST_TOKENS
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.longrope import long_rows
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.runner import Runnable

PREFILL_WIDTH = 512
"""Most tokens of each row that one forward pass of a prefill reads."""

SHARED_WIDTH = 16
"""Tokens of each row that a forward pass on a CPU may read however many rows there are. At 64
rows 8, 16 and 32 took about the same time; the fewer, the more often the cache is read."""


class Prefill:
    """The prefill of one batch, which the caller advances pass by pass.

    Between two passes the caller may remove rows, from the context and the cache alike. The widths
    of the passes are those of the rows at the beginning.

    Args:
        model: the model that reads the prompts.
        cache: a cache of the batch that is empty, or holds the first tokens of rows.
        context: the batch; all its tokens but each row's last are read, unless the cache has them.
        num_tokens: tokens of each row that are read; None for all but the last.
        hidden_layers: the layers whose hidden states ``read`` takes.
        read: takes the hidden states of each forward pass, zeros of rows that took no part; None if
            nobody does.

    Attributes:
        num_tokens: tokens of each row that all forward passes together read.
        reused: tokens of each row that the cache held from the beginning.
    """

    def __init__(
        self,
        model: Runnable,
        cache: KVCache,
        context: Context,
        num_tokens: int | None = None,
        hidden_layers: tuple[int, ...] = (),
        read: ReadHidden | None = None,
    ) -> None:
        self.cache = cache
        self._model = model
        self._context = context
        self.reused = list(cache.lengths)
        missing = [n - 1 - m for n, m in zip(context.lengths, self.reused, strict=True)]
        self.num_tokens = max(missing) if num_tokens is None else num_tokens
        self._hidden_layers = () if read is None else hidden_layers
        self._read = read
        self._widths = list(self._planned(missing))[::-1]
        self._first = 0

    @property
    def next_width(self) -> int:
        """Tokens of each row that the next forward pass reads; 0 once all are read, or if no row is
        left."""
        return self._widths[-1] if self._widths and self.cache.num_rows else 0

    @property
    def next_rows(self) -> int:
        """How many rows take part in the next forward pass, the first ones. All do in the first
        pass, which allocates their KV buffers."""
        if not self._first or not self.cache.can_lead:
            return self.cache.num_rows
        lengths = self._context.lengths
        missing = [n - 1 - m for n, m in zip(lengths, self.cache.lengths, strict=True)]
        return max(1, _num_leading(missing))

    def step(self) -> None:
        """Runs the next forward pass."""
        width, num_rows = self.next_width, self.next_rows
        with self.cache.leading(num_rows):
            output = self._run(width)
        if self._read is not None:
            assert output.hidden_BNH is not None
            num_left_out = self.cache.num_rows - num_rows
            self._read(pad(output.hidden_BNH, (0, 0, 0, 0, 0, num_left_out)), self._first)
        self._first += width
        self._widths.pop()

    def _planned(self, missing: Sequence[int]) -> Iterator[int]:
        """The widths of all passes, by how many tokens of each row are to be read."""
        num_rows, first = len(missing), 0
        while first < self.num_tokens:
            if first and self.cache.can_lead:
                num_rows = max(1, _num_leading([n - first for n in missing]))
            width = min(width_of_passes(self.cache, num_rows), self.num_tokens - first)
            yield width
            first += width

    def _run(self, width: int) -> ForwardOutput:
        """A forward pass over the next tokens of the rows in the cache."""
        tokens_BN = self._tokens(width).clamp(max=self._model.num_tokens - 1)
        kept = None if self.cache.cuts_back else self._missing(width)
        output = self._model.forward(
            ForwardBatch(
                self.cache, tokens_BN, num_logits=1, hidden_layers=self._hidden_layers, kept=kept
            )
        )
        self.cache.append(width if kept is None else kept)
        return output

    def finish(self) -> KVCache:
        """Runs the forward passes that are left; returns the cache, which is then complete."""
        while self.next_width:
            self.step()
        if self.cache.num_rows:
            self.cache.rollback(self._context.sequence_lengths - 1)
        self.cache.health = self._context.health
        return self.cache

    def _missing(self, width: int) -> Lengths:
        """How many of the next tokens of each row the cache is to hold."""
        pairs = zip(self._context.lengths, self.cache.lengths, strict=True)
        kept = [max(0, min(width, n - 1 - m)) for n, m in pairs]
        return Lengths.of(kept, self._context.device)

    def _tokens(self, width: int) -> Tensor:
        """The next tokens of each row, (B, N); after a row's end they are arbitrary."""
        lengths = self.cache.lengths
        tokens_BT = self._context.tokens_BT[: len(lengths)]
        if min(lengths) == max(lengths):
            return tokens_BT[:, lengths[0] : lengths[0] + width]
        index_BN = self.cache.length_B[:, None] + cached_arange(width, tokens_BT.device)
        return tokens_BT.gather(1, index_BN.clamp_(max=tokens_BT.shape[1] - 1))


def _num_leading(missing: Sequence[int]) -> int:
    """How many rows there are up to the last one that lacks tokens."""
    return max((row for row, num in enumerate(missing, 1) if num > 0), default=0)


def width_of_passes(cache: KVCache, num_rows: int) -> int:
    """Most tokens of each of so many rows that one forward pass of a prefill into this cache reads.

    A recurrent state is carried from pass to pass, and its layers compute chunks of many tokens,
    so short passes cost more than they save.
    """
    if cache.context.device.type != "cpu" or not cache.cuts_back:
        return PREFILL_WIDTH
    return min(PREFILL_WIDTH, max(SHARED_WIDTH, MOST_TOKENS // max(num_rows, 1)))


@dataclass(frozen=True)
class Prefilling:
    """A drafter's state for a batch, with the prefills of its models that the caller advances. The
    state is complete after :meth:`finish`; until then, rows may leave it, but it drafts nothing.

    Attributes:
        state: the state.
        prefills: of its models, in the order in which they run.
    """

    state: Any
    prefills: Sequence[Prefill] = ()

    @property
    def next_width(self) -> int:
        """Tokens of each row that the next forward pass reads; 0 once all are read."""
        return next((width for each in self.prefills if (width := each.next_width)), 0)

    def step(self) -> None:
        """Runs the next forward pass."""
        next(each for each in self.prefills if each.next_width).step()

    def finish(self) -> Any:
        """Runs the forward passes that are left; returns the state."""
        for each in self.prefills:
            each.finish()
        return self.state


@runtime_checkable
class PrefillsInSteps(Protocol):
    """A drafter whose models read prompts in forward passes that the caller runs."""

    def begin(self, context: Context) -> Prefilling:
        """As ``Drafter.start``, but the caller runs the forward passes."""


def begin(drafter: Drafter[Any], context: Context) -> Prefilling:
    """Begins a drafter's state for a batch; a drafter that is no ``PrefillsInSteps`` reads the
    prompts here."""
    if isinstance(drafter, PrefillsInSteps):
        return drafter.begin(context)
    return Prefilling(drafter.start(context))


def recompute_long_rows(model: Runnable, cache: KVCache, original: int) -> None:
    """Recomputes the keys and values of rows that have outgrown their short rotary factors
    (``hf/longrope.py``). Mutates the cache.

    Args:
        model: the model.
        cache: its cache.
        original: longest sequence with short factors.
    """
    context = cache.context
    if context.num_rows != len(cache.long):
        return  # a drafter with a vocabulary of its own starts with a context, and then drops it
    for row, long in enumerate(long_rows(context, original)):
        if long == cache.long[row]:
            continue
        alone = unsampled_context(model, context.tokens_BT[row, : context.lengths[row]].tolist())
        view = cache.row(row, alone)
        view.long = [long]
        Prefill(model.without_compiled(), view, alone, cache.lengths[row]).finish()
        cache.long[row] = long


def unsampled_context(model: Runnable, tokens: list[int], rows: int = 1) -> Context:
    """Rows with these tokens, from which nothing is sampled; an encoder-decoder's rows have them as
    their sources, too."""
    distribution: Any = None
    sources = None if model.decoder_prompt is None else [tuple(tokens)] * rows
    none = [0] * rows
    return Context.start([tokens] * rows, distribution, none, none, model.device, sources)
