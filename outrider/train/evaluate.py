"""Evaluation of a trained pair: bits per byte, acceptance α, and the cost of a draft step.

Leviathan's α = E[Σ_x min(p(x), q(x))] is computed at each position from both full distributions,
which has less variance than counting accepted draws.  At temperature 0 both are one-hot, and α is
how often the argmaxes agree.  α is measured on held-out text, and along the target's own samples at
that temperature, where speculative decoding uses the draft.

Shapes: B rows, T tokens, N positions, V vocabulary.  `p` target, `q` draft.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

TEMPERATURES = (0.0, 0.7, 1.0)


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """Convert a loss per token into bits per byte, a unit independent of the tokenizer."""
    return nats_per_token * num_tokens / num_bytes / math.log(2)


def acceptance(p_logits_NV: Tensor, q_logits_NV: Tensor, temperature: float) -> Tensor:
    """Σ_x min(p, q) at each position, [N], in float32."""
    if temperature == 0:
        return (p_logits_NV.argmax(-1) == q_logits_NV.argmax(-1)).float()
    p_NV = (p_logits_NV.float() / temperature).softmax(-1)
    q_NV = (q_logits_NV.float() / temperature).softmax(-1)
    return torch.minimum(p_NV, q_NV).sum(-1)


@torch.inference_mode()
def acceptance_along(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokens_BT: Tensor,
    temperature: float,
    first: int = 0,
) -> float:
    """Mean α over the positions that predict tokens `first`+1, … of each row."""
    p_logits_BTV = target(input_ids=tokens_BT, use_cache=False).logits[:, first:-1]
    q_logits_BTV = draft(input_ids=tokens_BT, use_cache=False).logits[:, first:-1]
    return acceptance(p_logits_BTV, q_logits_BTV, temperature).mean().item()


@torch.inference_mode()
def sample_rows(
    target: PreTrainedModel, prompts_BT: Tensor, num_tokens: int, temperature: float, seed: int
) -> Tensor:
    """Continue prompts of equal length by `num_tokens` tokens of the target, past any end token."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT, past = prompts_BT, None
    fed_BT = prompts_BT
    for _ in range(num_tokens):
        output = target(input_ids=fed_BT, past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits_BV = output.logits[:, -1].float()
        if temperature == 0:
            fed_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            p_BV = (logits_BV / temperature).softmax(-1)
            fed_BT = torch.multinomial(p_BV, 1, generator=generator)
        tokens_BT = torch.cat([tokens_BT, fed_BT], dim=1)
    return tokens_BT


@torch.inference_mode()
def step_seconds(
    models: Sequence[PreTrainedModel], context: int = 128, repeats: int = 60
) -> list[float]:
    """Median seconds of a forward pass over one token, for each model.

    The models alternate, so that other load on the machine affects all of them alike.

    Args:
        models: target and draft, for example.
        context: cached tokens before the first pass; every pass adds one.
        repeats: passes per model.
    """
    token_BT = torch.zeros(1, 1, dtype=torch.long)
    prompt_BT = token_BT.expand(1, context)
    caches = [model(input_ids=prompt_BT, use_cache=True).past_key_values for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(repeats):
        for model, cache, taken in zip(models, caches, seconds, strict=True):
            start = time.perf_counter()
            model(input_ids=token_BT, past_key_values=cache, use_cache=True)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


@dataclass(frozen=True)
class PairReport:
    """The measurements of a pair for its model card.

    Attributes:
        alpha_text: α on held-out text, by temperature.
        alpha_samples: α along the target's samples, by temperature.
        target_seconds: of a target step.
        draft_seconds: of a draft step.
    """

    alpha_text: dict[float, float]
    alpha_samples: dict[float, float]
    target_seconds: float
    draft_seconds: float

    @property
    def cost_ratio(self) -> float:
        """c: the time of a draft step relative to a target step."""
        return self.draft_seconds / self.target_seconds


def evaluate_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    held_out_BT: Tensor,
    prompt_tokens: int = 64,
    num_tokens: int = 128,
    seed: int = 0,
) -> PairReport:
    """Measure a pair on held-out rows, and on the target's continuations of their beginnings."""
    target.eval()
    draft.eval()
    chunks = held_out_BT.split(8)
    text, samples = {}, {}
    for temperature in TEMPERATURES:
        means = [acceptance_along(target, draft, rows, temperature) for rows in chunks]
        text[temperature] = statistics.fmean(means)
        means = []
        for index, rows in enumerate(chunks):
            sampled = sample_rows(
                target, rows[:, :prompt_tokens], num_tokens, temperature, seed + index
            )
            means.append(
                acceptance_along(target, draft, sampled, temperature, first=prompt_tokens - 1)
            )
        samples[temperature] = statistics.fmean(means)
    return PairReport(text, samples, *step_seconds([target, draft]))
