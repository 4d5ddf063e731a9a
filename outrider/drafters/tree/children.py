"""How the children of a node are taken from the distribution behind it, for all nodes of a level at
once.

    iid         inverse CDF of q, once per child
    distinct    the same, each time from q without the tokens already drawn, renormalised
    chosen      the k best, in order

Draws without replacement need the distribution summed anew after each, and not by subtraction: of a
distribution that is nearly sure, what is left without its first token would be rounding errors.
(The usual alternative, the top k of ``log(u)/q``, has the same distribution; it costs a random
number per token of the vocabulary, and decides by comparing random numbers, which exact enumeration
cannot follow.)

Legend: B rows, n nodes of a level, k children of each, R all nodes of all rows, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import draw


def independent(q_BnV: Tensor, u_Bnk: Tensor) -> Tensor:
    """Independent draws, (B, n, k). A token of probability zero is never drawn."""
    wide = torch.float32 if q_BnV.device.type == "mps" else torch.float64
    cdf_BnV = q_BnV.cumsum(-1, dtype=wide)
    token_Bnk = torch.searchsorted(cdf_BnV, u_Bnk.to(wide) * cdf_BnV[..., -1:], right=True)
    return token_Bnk.clamp_(max=cdf_BnV.shape[-1] - 1)


def without_replacement(q_BnV: Tensor, u_Bnk: Tensor) -> tuple[Tensor, Tensor]:
    """Draws that differ, (B, n, k), and which of them there are: as many as q has tokens."""
    left_RV, u_Rk = q_BnV.flatten(0, 1), u_Bnk.flatten(0, 1)
    tokens: list[Tensor] = []
    chances: list[Tensor] = []
    for u_R in u_Rk.unbind(1):
        if tokens:
            left_RV = left_RV.scatter(1, tokens[-1][:, None], 0.0)
        tokens.append(draw(left_RV, u_R))
        chances.append(left_RV.gather(1, tokens[-1][:, None])[:, 0])
    token_Rk, chance_Rk = torch.stack(tokens, 1), torch.stack(chances, 1)
    return token_Rk.view_as(u_Bnk), (chance_Rk > 0).view_as(u_Bnk)


def best(z_BnV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens of largest logit, best first, and which of them are possible at all."""
    missing = max(k - z_BnV.shape[-1], 0)
    top_Bnk, token_Bnk = z_BnV.topk(k - missing)
    return pad(token_Bnk, (0, missing)), pad(top_Bnk > -torch.inf, (0, missing), value=False)
