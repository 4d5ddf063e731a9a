"""β(n): how much longer a pass over n tokens takes than one over a single token.

Passes are the model's forward passes alone, over chains of n tokens behind the same text. Widths
take turns, so that a machine whose speed drifts does not bend the curve.

Legend: B rows, N tokens of a pass.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence

import torch

from outrider.core import Context, Draft
from outrider.runtime import HFModel, KVCache
from outrider.sampling import Sampling, Warp

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
REPEATS = 25
_ENOUGH, _PATIENCE = 5, 6.0  # fewer repeats do, once so many seconds are over
_WARM_UP = 2


def pass_times(
    model: HFModel,
    text: Sequence[int],
    source: Sequence[int] | None = None,
    widths: Sequence[int] = WIDTHS,
    repeats: int = REPEATS,
) -> tuple[dict[int, float], KVCache]:
    """Median seconds of a pass by its number of tokens, and the cache that they ran behind.

    Args:
        model: whose passes.
        text: token ids; passes begin with the last of them.
        source: of an encoder-decoder, what its encoder reads.
        widths: how many tokens; what the model's context has no room for is left out.
        repeats: passes per width; of a slow model fewer, but five at least.
    """
    context = context_of(model, text, source)
    widths = [n for n in widths if len(text) - 1 + n <= model.limit]
    seconds: dict[int, list[float]] = {n: [] for n in widths}
    with torch.inference_mode():
        cache = model.start(context)
        drafts = {n: _chain(context, model, n) for n in widths}
        began = _elapsed(model)
        for repeat in range(repeats + _WARM_UP):
            if repeat >= _ENOUGH + _WARM_UP and _elapsed(model) - began > _PATIENCE:
                break
            for n in widths:
                before = _elapsed(model)
                model.score(cache, drafts[n])
                seconds[n].append(_elapsed(model) - before)
    return {n: statistics.median(times[_WARM_UP:]) for n, times in seconds.items()}, cache


def context_of(model: HFModel, text: Sequence[int], source: Sequence[int] | None) -> Context:
    """A batch of one row with that text."""
    distribution = Warp([Sampling()], model.num_tokens, model.device)
    sources = None if source is None else [list(source)]
    return Context.start([list(text)], distribution, [0], [0], model.device, sources)


def interpolated(times: dict[int, float], num: float) -> float:
    """The time of so many tokens, on the line between the measured neighbours; beyond the last
    one, on the line through the last two."""
    widths = sorted(times)
    if len(widths) == 1:
        return times[widths[0]]
    i = min(max(bisect_left(widths, num), 1), len(widths) - 1)
    low, high = widths[i - 1], widths[i]
    share = (num - low) / (high - low)
    return (1 - share) * times[low] + share * times[high]


def _chain(context: Context, model: HFModel, num_tokens: int) -> Draft:
    """The root and tokens of the text itself behind it, whatever they mean there."""
    T = context.lengths[0]
    place_N = (torch.arange(num_tokens, device=context.device) + T - 1) % T
    tokens_BN = context.tokens_BT[:, place_N].clamp(max=model.num_tokens - 1)
    return Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")


def _elapsed(model: HFModel) -> float:
    """Seconds that the model has spent in forward passes so far."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return model.watch.seconds()
