"""The check of greedy settings: every emitted token is the target's argmax, scored from scratch.

Legend: B rows, T tokens of a continuation, V vocabulary.
"""

from collections.abc import Sequence

import torch

from outrider.core import Draft, Prefix
from outrider.lab.certify.pair import Pair, continuations, on_float64_device
from outrider.lab.certify.report import Check

NAME = "greedy"
# A near-tie is a logit gap of at most this many rounding steps of the larger logit,
_ROUNDINGS = 4
# or of at most this much, since rounding errors of many small operations add up.
_SLACK = 1e-4


def check(
    pair: Pair, prompts: Sequence[Sequence[int]], length: int, first_request: int, verified: bool
) -> Check:
    """Checks one continuation per prompt. Near-ties are reported and do not fail the check.

    Args:
        pair: the models, the drafter and the rule.
        prompts: token ids.
        length: tokens of each continuation.
        first_request: request number of every continuation.
        verified: whether a wrong token fails the check; without, it is only reported.
    """
    wrong, ties, worst = 0, 0, 0.0
    for prompt in prompts:
        tokens_BT = continuations(pair, prompt, 1, length, first_request)
        context = pair.context([prompt], 0)
        tokens_BT = tokens_BT.to(context.device)
        nodes_BT = torch.cat([context.root_B[:, None], tokens_BT[:, :-1]], 1)
        draft = Draft.chain(nodes_BT, torch.ones_like(nodes_BT, dtype=torch.bool), None, "chosen")
        logits_BTV = pair.target.score(pair.target.start(context), draft).logits_BNV
        z_BTV = context.distribution.logits(logits_BTV, Prefix.of_draft(context, draft))
        z_BTV, tokens_BT = on_float64_device(z_BTV).double(), on_float64_device(tokens_BT)
        best_BT = z_BTV.amax(2)
        emitted_BT = z_BTV.gather(2, tokens_BT[..., None])[..., 0]
        gap_BT = best_BT - emitted_BT
        step = torch.finfo(logits_BTV.dtype).eps
        largest_BT = torch.maximum(best_BT.abs(), emitted_BT.abs())
        tie_BT = gap_BT <= (_ROUNDINGS * step * largest_BT).clamp(min=_SLACK)
        differs_BT = gap_BT > 0
        wrong += int((differs_BT & ~tie_BT).sum())
        ties += int((differs_BT & tie_BT).sum())
        worst = max(worst, float(gap_BT.max()))
    total = len(prompts) * length
    what = f"all {total} tokens are the target's argmax"
    if wrong:
        what = f"{wrong} of {total} tokens are not the target's argmax"
    if ties:
        what += f", {ties} up to a near-tie"
    words = f"{what}; largest logit gap {worst:.2g}"
    return Check(NAME, wrong == 0 if verified else None, worst, words, what)
