"""Settings at temperature 0: every token is the target's argmax, from scratch.

Legend: B rows, L tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch

from outrider.core import Draft, Prefix
from outrider.lab.certify.pair import Pair, able, continuations
from outrider.lab.certify.report import Check

NAME = "greedy"
_ROUNDINGS = 4  # gaps of up to so many rounding steps of the larger logit are near-ties
_SLACK = 1e-4  # and anything below this, where errors add up over many small steps


def check(
    pair: Pair, prompts: Sequence[Sequence[int]], length: int, first_request: int, verified: bool
) -> Check:
    """One text per prompt. Near-ties, which rounding explains, are reported and do not fail."""
    wrong, ties, worst = 0, 0, 0.0
    for prompt in prompts:
        tokens_BL = continuations(pair, prompt, 1, length, first_request)
        context = pair.context([prompt], 0)
        tokens_BL = tokens_BL.to(context.device)
        nodes_BL = torch.cat([context.root_B[:, None], tokens_BL[:, :-1]], 1)
        draft = Draft.chain(nodes_BL, torch.ones_like(nodes_BL, dtype=torch.bool), None, "chosen")
        logits_BLV = pair.target.score(pair.target.start(context), draft).logits_BNV
        z_BLV = context.distribution.logits(logits_BLV, Prefix.of_draft(context, draft))
        z_BLV, tokens_BL = able(z_BLV).double(), able(tokens_BL)
        best_BL = z_BLV.amax(2)
        mine_BL = z_BLV.gather(2, tokens_BL[..., None])[..., 0]
        gap_BL = best_BL - mine_BL
        step = torch.finfo(logits_BLV.dtype).eps
        largest_BL = torch.maximum(best_BL.abs(), mine_BL.abs())
        tie_BL = gap_BL <= (_ROUNDINGS * step * largest_BL).clamp(min=_SLACK)
        differs_BL = gap_BL > 0
        wrong += int((differs_BL & ~tie_BL).sum())
        ties += int((differs_BL & tie_BL).sum())
        worst = max(worst, float(gap_BL.max()))
    total = len(prompts) * length
    what = f"all {total} tokens are the target's argmax"
    if wrong:
        what = f"{wrong} of {total} tokens are not the target's argmax"
    if ties:
        what += f", {ties} up to a near-tie"
    words = f"{what}; largest logit gap {worst:.2g}"
    return Check(NAME, wrong == 0 if verified else None, worst, words, what)
