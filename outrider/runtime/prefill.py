"""Prefill: the tokens of a prompt enter the KV cache, in forward passes of bounded width.

A short prompt is prefilled by a compiled program where there is one. The program computes the
logits of every token, though a prefill needs none. For a short prompt that costs less than Python
takes between the operations of the layers; for a long one, or a vocabulary that holds most of a
model's weights, it does not, and the prefill runs eagerly (``runner.py``).

Legend: B rows, N query tokens.
"""

from typing import Any

from outrider.core.context import Context
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf.longrope import long_rows
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.runner import Runnable

_MOST_QUERIES = 512
"""Query tokens of a row in one forward pass of a prefill."""


def prefill(
    model: Runnable, cache: KVCache, context: Context, num_tokens: int | None = None
) -> None:
    """Feeds all tokens of the context but the last of each row, or the first ``num_tokens``.
    Mutates the cache, whose health then has the forward passes noted."""
    if num_tokens is None:
        num_tokens = max(context.lengths) - 1
    for first in range(0, num_tokens, _MOST_QUERIES):
        queries = slice(first, min(first + _MOST_QUERIES, num_tokens))
        tokens_BN = context.tokens_BT[:, queries].clamp(max=model.num_tokens - 1)
        model.forward(ForwardBatch(cache, tokens_BN, num_logits=1))
        cache.append(tokens_BN.shape[1])
    cache.rollback(context.sequence_lengths - 1)


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
        prefill(model.without_compiled(), view, alone, cache.lengths[row])
        cache.long[row] = long


def unsampled_context(model: Runnable, tokens: list[int], rows: int = 1) -> Context:
    """Rows with these tokens, from which nothing is sampled; an encoder-decoder's rows have them as
    their sources, too."""
    distribution: Any = None
    sources = None if model.decoder_prompt is None else [tuple(tokens)] * rows
    none = [0] * rows
    return Context.start([tokens] * rows, distribution, none, none, model.device, sources)
