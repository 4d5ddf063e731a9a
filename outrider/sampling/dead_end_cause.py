"""Finds the sampling parameter that left no token to sample at a position.

The parameters are applied cumulatively, in the order of :class:`outrider.sampling.Sampling`, until
no token is left.

Legend: B rows, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Context, Prefix
from outrider.sampling.params import Sampling
from outrider.sampling.warp import Warp


def dead_end_cause(
    sampling: Sampling, logits_V: Tensor, ids: Sequence[int], prompt_length: int
) -> str:
    """The first parameter after which no token is left, and its effect, as words for an error.

    Args:
        sampling: the request's parameters.
        logits_V: the model's logits at the position.
        ids: all tokens before the position.
        prompt_length: how many of ``ids`` belong to the prompt.
    """
    V, device = logits_V.shape[0], logits_V.device
    for name, part in _cumulative(sampling):
        distribution = Warp([part], V, device)
        context = Context.start([ids], distribution, [0], [0], device)
        context.prompt_length_B = torch.tensor([prompt_length], device=device)
        greatest = float(
            distribution.raw_logits(logits_V[None, None], Prefix.of_chain(context, [])).amax()
        )
        if greatest == -torch.inf:
            return f"{name} forbids every token"
        if greatest - greatest != 0:
            return f"{name} makes logits NaN or infinite"
    return "its logits processors forbid every token, or make logits NaN or infinite"


def _cumulative(sampling: Sampling) -> Iterator[tuple[str, Sampling]]:
    """The name of each parameter, and the sampling parameters up to and including it."""
    part = Sampling(logit_bias=sampling.logit_bias)
    yield "logit_bias (with the tokens that the generation config suppresses)", part
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        part = replace(part, **{name: getattr(sampling, name)})
        yield f"{name}={getattr(sampling, name)!r}", part
    for number, processor in enumerate(sampling.processors):
        part = replace(part, processors=sampling.processors[: number + 1])
        kind = getattr(processor, "__name__", type(processor).__name__)
        yield f"logits processor {number} ({kind})", part
