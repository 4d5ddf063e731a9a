"""A prompt's way into the cache: in passes of bounded width, as one graph where that is faster.

A graph computes the logits behind every token, though a prefill needs none of them. For a short
prompt that costs less than Python takes between the operations of the layers; for a long one, or a
vocabulary that is most of a model, it does not.

Legend: B rows, N columns of a pass.
"""

import copy
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.clock import Stopwatch
from outrider.core.context import Context
from outrider.runtime.kv_cache.storage import KVCachePlan, KVLayout

if TYPE_CHECKING:
    from outrider.runtime.hf.adapter import HFModel
    from outrider.runtime.kv_cache.cache import KVCache

_COLUMNS = 512
_PRODUCTS_PER_LAYER = 2**26
"""As many multiplications take about as long as Python takes around the operations of a layer, 0.7
and 0.8 ms (AMD EPYC, 2 threads)."""


def prefill(
    model: "HFModel", cache: "KVCache", context: Context, longest: int | None = None
) -> None:
    """Feeds an empty cache all tokens of the context but the last, or the first ``longest``."""
    if longest is None:
        longest = max(context.lengths) - 1
    if longest and model.graph_of(cache, longest, 1) is not None:
        if model.layout is None:
            model.layout = _layout(model)
        cache.reserve(context.num_rows, longest, model.layout)
    for first in range(0, longest, _COLUMNS):
        columns = slice(first, min(first + _COLUMNS, longest))
        tokens_BN = context.tokens_BT[:, columns].clamp(max=model.num_tokens - 1)
        model.extend(cache, tokens_BN, num_logits=1)
        cache.append(tokens_BN.shape[1])
    cache.rollback(context.sequence_lengths - 1)


def all_logits_are_cheap(model: "HFModel", num_tokens: int) -> bool:
    """Whether the logits behind so many tokens cost less than a pass without a graph would."""
    width: int | None = getattr(model.module.config.get_text_config(), "hidden_size", None)
    if width is None:
        return False
    return num_tokens * model.num_tokens * width <= _PRODUCTS_PER_LAYER * model.num_layers


def unsampled_context(model: "HFModel", tokens: list[int], rows: int = 1) -> Context:
    """Rows with these tokens, of which nothing is sampled; where an encoder reads a source, that
    has them too."""
    distribution: Any = None
    sources = None if model.decoder_prompt is None else [tuple(tokens)] * rows
    none = [0] * rows
    return Context.start([tokens] * rows, distribution, none, none, model.device, sources)


@torch.inference_mode()
def example_cache(model: "HFModel") -> "KVCache":
    """The cache behind one token, filled without a graph and held to no bound: what a model's KV
    buffers look like."""
    twin = copy.copy(model)
    twin.compiled, twin.plan = None, KVCachePlan(model.plan.kv_dtype)
    twin.watch = Stopwatch(model.device)
    return twin.start(unsampled_context(model, [0, 0]))


def _layout(model: "HFModel") -> KVLayout:
    """The shapes of a model's KV buffers; none where not every layer has KV buffers, which then
    come with the passes."""
    cache = example_cache(model)
    sides = zip(cache.keys, cache.values, strict=True)
    buffers = [(key, value) for key, value in sides if key is not None and value is not None]
    if len(buffers) < model.num_layers:
        return KVLayout((), model.dtype, model.device)
    shapes = tuple((key.shape[1], key.shape[3], value.shape[3]) for key, value in buffers)
    return KVLayout(shapes, buffers[0][0].dtype, model.device)
