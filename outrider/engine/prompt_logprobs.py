"""Log-probabilities of a prompt's own tokens under the target.

They are what ``logprobs.py`` computes of emitted tokens: the log softmax of the target's raw logits
in float32. The target reads the prompt once, apart from any batch.

Legend: N tokens, V vocabulary, C top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.engine.request import TopLogprobs
from outrider.runtime import HFModel


@dataclass(frozen=True)
class PromptLogprobs:
    """What the target makes of each token of a prompt but the first, which nothing precedes.

    Attributes:
        logprobs: the token's log-probability.
        top: the most probable tokens at its position; none of them where none were asked for.
    """

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...]


@torch.inference_mode()
def prompt_logprobs(target: HFModel, prompt: Sequence[int], num_top: int) -> PromptLogprobs:
    """The log-probabilities of a prompt's tokens, from the second on.

    Args:
        target: a decoder-only model.
        prompt: token ids.
        num_top: how many of the most probable tokens to name at each position.

    Raises:
        NonFiniteLogitsError: the target produced NaN or infinite logits.
    """
    chosen: list[float] = []
    top: list[TopLogprobs] = []
    for logits_NV in target.logits_within(prompt):
        first = len(chosen) + 1
        next_N = torch.tensor(prompt[first : first + len(logits_NV)], device=logits_NV.device)
        logprobs_NV = logits_NV[: len(next_N)].float().log_softmax(-1)
        chosen_N = logprobs_NV.gather(1, next_N[:, None])[:, 0]
        if bool(chosen_N.isnan().any()):
            raise target.non_finite(first)
        chosen += chosen_N.tolist()
        best = logprobs_NV.topk(min(num_top, logprobs_NV.shape[1]), dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top += [TopLogprobs(tuple(ids), tuple(values)) for ids, values in rows]
    return PromptLogprobs(tuple(chosen), tuple(top))
