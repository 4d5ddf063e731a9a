"""Prefill: the prompts of a batch enter the KV cache, in forward passes of bounded width.

A caller may do other work between two forward passes; the tokens per pass, and so every bit of the
result, stay the same.

A short prompt is prefilled by a compiled program where there is one. The program computes the
logits of every token, though a prefill needs none. For a short prompt that costs less than Python
takes between the operations of the layers; for a long one, or a vocabulary that holds most of a
model's weights, it does not, and the prefill runs eagerly (``runner.py``).

Legend: B rows, N query tokens, H hidden width (times the layers asked for).
"""

from typing import Any

from outrider.core.context import Context
from outrider.core.protocols import ReadHidden
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf.longrope import long_rows
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.runner import Runnable

PREFILL_WIDTH = 512
"""Most tokens of each row that one forward pass of a prefill reads."""


class Prefill:
    """The prefill of one batch, which the caller advances pass by pass.

    Between two passes the caller may remove rows, from the context and the cache alike.

    Args:
        model: the model that reads the prompts.
        cache: an empty cache of the batch.
        context: the batch; all its tokens but each row's last are read.
        num_tokens: tokens of each row that are read; None for all but the last.
        hidden_layers: the layers whose hidden states ``read`` takes.
        read: takes the hidden states of each forward pass; None if nobody does.
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
        self._num_tokens = max(context.lengths) - 1 if num_tokens is None else num_tokens
        self._hidden_layers = () if read is None else hidden_layers
        self._read = read
        self._first = 0

    @property
    def next_width(self) -> int:
        """Tokens of each row that the next forward pass reads; 0 once all are read."""
        return min(PREFILL_WIDTH, self._num_tokens - self._first)

    def step(self) -> None:
        """Runs the next forward pass."""
        width = self.next_width
        tokens_BN = self._context.tokens_BT[:, self._first : self._first + width]
        tokens_BN = tokens_BN.clamp(max=self._model.num_tokens - 1)
        output = self._model.forward(
            ForwardBatch(self.cache, tokens_BN, num_logits=1, hidden_layers=self._hidden_layers)
        )
        self.cache.append(width)
        if self._read is not None:
            assert output.hidden_BNH is not None
            self._read(output.hidden_BNH, self._first)
        self._first += width

    def finish(self) -> KVCache:
        """Runs the forward passes that are left; returns the cache, which is then complete."""
        while self.next_width:
            self.step()
        self.cache.rollback(self._context.sequence_lengths - 1)
        self.cache.health = self._context.health
        return self.cache


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
