"""Prefill: the prompts of a batch enter the KV cache in forward passes of bounded width.

A caller may do other work between two passes; the tokens per pass, and so every bit of the result,
stay the same. A pass is one compiled graph where that is faster.

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

PREFILL_WIDTH = 512
"""Most tokens of each row that one forward pass of a prefill reads."""
_PRODUCTS_PER_LAYER = 2**26
"""As many multiplications take about as long as Python takes around the operations of a layer, 0.7
and 0.8 ms (AMD EPYC, 2 threads)."""


class Prefill:
    """The prefill of one batch, which the caller advances pass by pass.

    Between two passes the caller may remove rows, from the context and the cache alike.

    Args:
        model: the model that reads the prompts.
        cache: an empty cache of the batch.
        context: the batch; all its tokens but each row's last are read.
        longest: tokens of each row that are read; None for all but the last.
    """

    def __init__(
        self, model: "HFModel", cache: "KVCache", context: Context, longest: int | None = None
    ) -> None:
        if longest is None:
            longest = max(context.lengths) - 1
        self.cache = cache
        self._model = model
        self._context = context
        self._longest = longest
        self._first = 0
        if longest and model.graph_of(cache, longest, 1) is not None:
            if model.layout is None:
                model.layout = _layout(model)
            cache.reserve(context.num_rows, longest, model.layout)

    @property
    def next_width(self) -> int:
        """Tokens of each row that the next pass reads; 0 once all are read."""
        return min(PREFILL_WIDTH, self._longest - self._first)

    def step(self) -> None:
        """Runs the next pass."""
        model, cache, context, first = self._model, self.cache, self._context, self._first
        columns = slice(first, first + self.next_width)
        cache.lengths = [first] * context.num_rows
        cache.length_B = torch.full_like(context.length_B, first)
        tokens_BN = context.tokens_BT[:, columns].clamp(max=model.num_tokens - 1)
        model.extend(cache, tokens_BN, num_logits=1)
        self._first = columns.stop

    def finish(self) -> "KVCache":
        """Runs the passes that are left; returns the cache, which is then complete."""
        while self.next_width:
            self.step()
        self.cache.lengths = [length - 1 for length in self._context.lengths]
        self.cache.length_B = self._context.length_B - 1
        self.cache.health = self._context.health
        return self.cache


def prefill(
    model: "HFModel", cache: "KVCache", context: Context, longest: int | None = None
) -> None:
    """Feeds all tokens of the context but the last, or so many of them."""
    Prefill(model, cache, context, longest).finish()


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
