"""Perplexity: e to the mean negative log-probability per token, of outputs under the target.

``micro`` weights all tokens equally, ``macro`` all outputs: for outputs i with n_i tokens x_ij,

    micro = exp(-Σ_ij log p(x_ij) / Σ_i n_i)
    macro = exp(-mean_i (Σ_j log p(x_ij) / n_i))

p is the target's own distribution, at temperature 1 and without truncation, whatever the outputs
were sampled with, and the prompt is given. Outputs sampled at a lower temperature have a lower
perplexity, so perplexities compare methods only at equal sampling parameters. The perplexity of
text that a model repeats is low as well: it measures likelihood, not usefulness.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.quality.logprobs import BATCH, continuation_logprobs
from outrider.runtime import HFModel


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of several outputs.

    Attributes:
        micro: weights all tokens equally.
        macro: weights all outputs equally.
        nats: mean negative log-probability per token of each output, for intervals over prompts;
            NaN for an output without tokens.
        num_tokens: tokens of all outputs together.
    """

    micro: float
    macro: float
    nats: tuple[float, ...]
    num_tokens: int


def output_perplexity(
    model: HFModel,
    outputs: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_size: int = BATCH,
) -> Perplexity:
    """The perplexity of outputs under a model. Outputs without tokens count in neither average; if
    there are no others, both averages are NaN.

    Args:
        model: the target.
        outputs: token ids of a prompt and of its output.
        batch_size: most rows of a forward pass.

    Raises:
        PromptError, NonFiniteLogitsError: see ``continuation_logprobs``.
    """
    scored = continuation_logprobs(model, outputs, batch_size=batch_size)
    nats = tuple(-each.total / len(each.logprobs) if each.logprobs else math.nan for each in scored)
    counted = [each for each in nats if not math.isnan(each)]
    num_tokens = sum(len(each.logprobs) for each in scored)
    if not counted:
        return Perplexity(math.nan, math.nan, nats, 0)
    micro = _exp(-math.fsum(each.total for each in scored) / num_tokens)
    return Perplexity(micro, _exp(statistics.fmean(counted)), nats, num_tokens)


def _exp(nats: float) -> float:
    """e to the nats; infinite where an output has probability 0 or less than float64 can invert."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
