"""Distillation of a draft model from a frozen target: supervised DistillSpec with forward KL.

Zhou et al. 2024, https://arxiv.org/abs/2310.08461.  The draft is trained on the target's whole
distribution at every position of the corpus, not only on its most likely token.  The acceptance α
depends on the whole distribution.

Shapes: B rows, T tokens of a row (a batch carries T+1), V vocabulary.  `p` target, `q` draft.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from outrider.train.losses import Divergence, Objective, forward_kl


def copy_embeddings(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> bool:
    """Start the draft from the target's embeddings (and so its tied head) and final norm.

    Mutates `draft`.  Returns False, changing nothing, when the hidden sizes differ.
    """
    if target.config.hidden_size != draft.config.hidden_size:
        return False
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        draft.model.norm.weight.copy_(target.model.norm.weight)
    return True


def distillation(
    draft: PreTrainedModel, target: PreTrainedModel, divergence: Divergence = forward_kl
) -> Objective:
    """The mean divergence of the draft from the frozen target over all positions of a batch.

    Freezes the target.
    """
    target.requires_grad_(False).eval()

    def objective(tokens_BT: Tensor) -> Tensor:
        inputs_BT = tokens_BT[:, :-1]
        with torch.no_grad():
            p_logits_BTV = target(input_ids=inputs_BT, use_cache=False).logits
        q_logits_BTV = draft(input_ids=inputs_BT, use_cache=False).logits
        return divergence(p_logits_BTV.flatten(0, 1), q_logits_BTV.flatten(0, 1)).mean()

    return objective
