"""Where the distributions of a pair meet: both models at the same places of the target's own texts.

Legend: B rows (one), N places of a text, K places in all, V vocabulary.
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

_MOST_TEXTS = 64  # of one prompt, should its texts be short


@torch.inference_mode()
def meet(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_places: int,
) -> tuple[Tensor, Tensor]:
    """The distributions p and q that a token is drawn from, (K, V) each, in float32.

    The target continues the prompts by its own samples; all prompts have about equal shares in the
    places. There are fewer than ``num_places`` if the texts are too short.
    """
    plain = Engine(target, None, METHODS["plain"], generation_config=False)
    p, q, found = [], [], 0
    for round_ in range(_MOST_TEXTS):
        share = -(-(num_places - found) // len(prompts))
        wanted = replace(
            sampling,
            seed=sampling.seed + round_,
            max_new_tokens=min(share, sampling.max_new_tokens),
        )
        for result in plain.generate(list(prompts), wanted):
            p.append(_distributions(target, result, sampling, target.num_tokens))
            q.append(_distributions(draft, result, sampling, target.num_tokens))
            found += len(result.token_ids)
        if found >= num_places:
            break
    return torch.cat(p)[:num_places], torch.cat(q)[:num_places]


def _distributions(model: HFModel, result: Result, sampling: Sampling, num_tokens: int) -> Tensor:
    """A model's distribution at each place of a text, (N, V): the text is a draft that it
    scores."""
    distribution = Warp([sampling], num_tokens, model.device)
    context = Context.start([result.prompt_ids], distribution, [0], [0], model.device)
    tokens_BN = torch.tensor([[result.prompt_ids[-1], *result.token_ids[:-1]]], device=model.device)
    text = Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")
    seen_BN = tokens_BN.clamp(max=model.num_tokens - 1)  # the target's padding may be emitted
    seen = Draft.chain(seen_BN, text.mask_BN, None, "chosen")
    logits_BNV = model.score(model.start(context), seen).logits_BNV
    context.health.check(len(result.prompt_ids))
    missing = num_tokens - logits_BNV.shape[-1]
    logits_BNV = logits_BNV[..., :num_tokens]
    if missing > 0:
        logits_BNV = torch.nn.functional.pad(logits_BNV, (0, missing), value=-torch.inf)
    return distribution(logits_BNV, Prefix.of_draft(context, text))[0].float()
