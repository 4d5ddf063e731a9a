"""Takes the children of a node from its distribution, for all nodes of a level at once.

    iid         inverse CDF of q, once per child
    distinct    the same, each time from q without the tokens already drawn, renormalised
    chosen      the k most probable tokens, in order

A draw without replacement sums the remaining distribution again and does not subtract from the old
sum: where one token has nearly all the mass, the difference would be rounding error. (The usual
alternative, the top k of ``log(u)/q``, has the same distribution. It costs a random number per
token of the vocabulary, and it compares random numbers with each other, which exact enumeration
cannot follow.)

Legend: B rows, n nodes of a level, k children of each, R nodes of all rows (B·n), V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import draw_distinct


def independent(q_BnV: Tensor, u_Bnk: Tensor) -> Tensor:
    """Independent draws, (B, n, k). A token of probability zero is never drawn."""
    wide = torch.float32 if q_BnV.device.type == "mps" else torch.float64
    cdf_BnV = q_BnV.cumsum(-1, dtype=wide)
    token_Bnk = torch.searchsorted(cdf_BnV, u_Bnk.to(wide) * cdf_BnV[..., -1:], right=True)
    return token_Bnk.clamp_(max=cdf_BnV.shape[-1] - 1)


def without_replacement(q_BnV: Tensor, u_Bnk: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct draws, (B, n, k), and which of them exist: no more than q has possible tokens."""
    token_Rk, weight_Rk = draw_distinct(q_BnV.flatten(0, 1), u_Bnk.flatten(0, 1))
    return token_Rk.view_as(u_Bnk), (weight_Rk > 0).view_as(u_Bnk)


def top(z_BnV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens of largest logit, in order, (B, n, k), and which of them are possible."""
    missing = max(k - z_BnV.shape[-1], 0)
    top_Bnk, token_Bnk = z_BnV.topk(k - missing)
    return pad(token_Bnk, (0, missing)), pad(top_Bnk > -torch.inf, (0, missing), value=False)
