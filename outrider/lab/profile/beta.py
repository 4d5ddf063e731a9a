"""β(n): the time of a forward pass over n tokens relative to a pass over a single token.

Only the model's forward passes are timed, over chains of n query tokens after the same sequence.
The widths are interleaved, so that a drift of the machine's speed does not distort the curve.

Legend: B rows, N query tokens of a pass, T context length.
"""

import statistics
from collections.abc import Sequence

import torch

from outrider.core import Context, Draft
from outrider.runtime import HFModel, KVCache
from outrider.sampling import Sampling, Warp

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
REPEATS = 25
_MIN_REPEATS, _MAX_SECONDS = 5, 6.0  # after the minimum, time out
_WARM_UP = 2


def pass_times(
    model: HFModel,
    tokens: Sequence[int],
    source: Sequence[int] | None = None,
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
) -> tuple[dict[int, float], KVCache]:
    """Median seconds of a forward pass by its width, and the KV cache on which the passes ran.

    Args:
        model: the model to time.
        tokens: the context; passes begin with its last token.
        source: for an encoder-decoder, the encoder's input.
        widths: numbers of query tokens; those that exceed the model's context are left out.
        repeats: passes per width; fewer for a slow model, but at least five.
    """
    context = context_of(model, tokens, source)
    widths = [n for n in widths if len(tokens) - 1 + n <= model.limit]
    seconds: dict[int, list[float]] = {n: [] for n in widths}
    with torch.inference_mode():
        cache = model.start(context)
        drafts = {n: _chain(context, model, n) for n in widths}
        began = _elapsed(model)
        for repeat in range(repeats + _WARM_UP):
            if repeat >= _MIN_REPEATS + _WARM_UP and _elapsed(model) - began > _MAX_SECONDS:
                break
            for n in widths:
                before = _elapsed(model)
                model.score(cache, drafts[n])
                seconds[n].append(_elapsed(model) - before)
    return {n: statistics.median(times[_WARM_UP:]) for n, times in seconds.items()}, cache


def context_of(model: HFModel, tokens: Sequence[int], source: Sequence[int] | None) -> Context:
    """A batch with one row of these tokens."""
    distribution = Warp([Sampling()], model.num_tokens, model.device)
    sources = None if source is None else [list(source)]
    return Context.start([list(tokens)], distribution, [0], [0], model.device, sources)


def _chain(context: Context, model: HFModel, num_tokens: int) -> Draft:
    """A draft of the root followed by tokens from the beginning of the context, as filler."""
    T = context.lengths[0]
    index_N = (torch.arange(num_tokens, device=context.device) + T - 1) % T
    tokens_BN = context.tokens_BT[:, index_N].clamp(max=model.num_tokens - 1)
    return Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")


def _elapsed(model: HFModel) -> float:
    """Seconds that the model has spent in forward passes so far."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return model.watch.seconds()
