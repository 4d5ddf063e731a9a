"""Collects the distributions of both models at the same positions of the target's own samples.

Legend: B rows (one), N positions of a continuation, K positions in all, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Context, Draft, Prefix
from outrider.engine import Engine, Result
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.sampling import Sampling, Warp

_MAX_CONTINUATIONS = 64  # of one prompt, if its continuations are short


@torch.inference_mode()
def paired_distributions(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_positions: int,
) -> tuple[Tensor, Tensor]:
    """p and q at the positions of the target's own continuations, (K, V) each, in float32.

    All prompts contribute about equally many positions. There are fewer than ``num_positions`` if
    the continuations are too short.

    Args:
        target: samples the continuations.
        draft: is only scored.
        prompts: token ids, at least one prompt.
        sampling: how the target samples, and the warping of both distributions.
        num_positions: K, if there are that many.
    """
    plain = Engine(target, None, METHODS["plain"], generation_config=False)
    p, q, found = [], [], 0
    for repeat in range(_MAX_CONTINUATIONS):
        share = -(-(num_positions - found) // len(prompts))
        reseeded = replace(
            sampling,
            seed=(sampling.seed or 0) + repeat,
            max_new_tokens=min(share, sampling.max_new_tokens),
        )
        for result in plain.generate(list(prompts), reseeded):
            p.append(_distributions(target, result, sampling, target.num_tokens))
            q.append(_distributions(draft, result, sampling, target.num_tokens))
            found += len(result.token_ids)
        if found >= num_positions:
            break
    return torch.cat(p)[:num_positions], torch.cat(q)[:num_positions]


def _distributions(model: HFModel, result: Result, sampling: Sampling, num_tokens: int) -> Tensor:
    """A model's distribution at each position of a continuation, (N, V).

    The continuation is scored as a draft, in one forward pass.
    """
    distribution = Warp([sampling], num_tokens, model.device)
    context = Context.start([result.prompt_ids], distribution, [0], [0], model.device)
    tokens_BN = torch.tensor([[result.prompt_ids[-1], *result.token_ids[:-1]]], device=model.device)
    chain = Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")
    # The target may emit padding tokens that the draft's vocabulary does not have.
    clamped_BN = tokens_BN.clamp(max=model.num_tokens - 1)
    clamped = Draft.chain(clamped_BN, chain.mask_BN, None, "chosen")
    logits_BNV = model.score(model.start(context), clamped).logits_BNV
    context.health.check(len(result.prompt_ids))
    missing = num_tokens - logits_BNV.shape[-1]
    logits_BNV = logits_BNV[..., :num_tokens]
    if missing > 0:
        logits_BNV = torch.nn.functional.pad(logits_BNV, (0, missing), value=-torch.inf)
    return distribution(logits_BNV, Prefix.of_draft(context, chain))[0].float()
