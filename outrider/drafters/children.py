"""How the children of a node are taken from the law behind it, for all nodes of a level at once.

    iid         inverse CDF of q, once per child
    distinct    the same, each time from q without the tokens already drawn, renormalised
    chosen      the k best, in order

Draws without replacement need the law summed anew after each, and not by subtraction: of a law that
is nearly sure, what is left without its first token would be rounding errors. So sums are kept per
block of S tokens, and a draw sums one block again. (The usual alternative, the top k of
``log(u)/q``, has the same law; it costs a random number per token of the vocabulary, and decides by
comparing random numbers, which exact enumeration cannot follow.)

Legend: B rows, n nodes of a level, k children of each, V vocabulary, G blocks, S tokens of a block.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_S = 256


def independent(q_BnV: Tensor, u_Bnk: Tensor) -> Tensor:
    """Independent draws, (B, n, k). A token of probability zero is never drawn."""
    cdf_BnV = q_BnV.cumsum(-1, dtype=_wide(q_BnV))
    return _at(cdf_BnV, u_Bnk.to(cdf_BnV.dtype) * cdf_BnV[..., -1:])


def without_replacement(q_BnV: Tensor, u_Bnk: Tensor) -> tuple[Tensor, Tensor]:
    """Draws that differ, (B, n, k), and which of them there are: as many as q has tokens."""
    V, wide = q_BnV.shape[-1], _wide(q_BnV)
    q_BnGS = pad(q_BnV, (0, -V % _S + _S)).unflatten(-1, (-1, _S))  # always a copy, written to
    sums_BnG = q_BnGS.sum(-1, dtype=wide)
    tokens, exist = [], []
    for u_Bn in u_Bnk.to(wide).unbind(-1):
        cdf_BnG = sums_BnG.cumsum(-1)
        total_Bn1 = cdf_BnG[..., -1:]
        threshold_Bn1 = u_Bn[..., None] * total_Bn1
        block_Bn1 = _at(cdf_BnG, threshold_Bn1)
        before_Bn1 = pad(cdf_BnG, (1, 0)).gather(-1, block_Bn1)

        block_Bn1S = block_Bn1[..., None].expand(-1, -1, -1, _S)
        q_BnS = q_BnGS.gather(2, block_Bn1S)[:, :, 0]
        cdf_BnS = q_BnS.cumsum(-1, dtype=wide)
        below_Bn1 = torch.nextafter(cdf_BnS[..., -1:], cdf_BnS.new_zeros(()))
        place_Bn1 = _at(cdf_BnS, torch.minimum(threshold_Bn1 - before_Bn1, below_Bn1))
        tokens.append((block_Bn1 * _S + place_Bn1)[..., 0].clamp(max=V - 1))
        exist.append(total_Bn1[..., 0] > 0)
        if len(tokens) == u_Bnk.shape[-1]:
            break

        q_BnS = q_BnS.scatter(-1, place_Bn1, 0.0)
        q_BnGS.scatter_(2, block_Bn1S, q_BnS[:, :, None])
        sums_BnG.scatter_(-1, block_Bn1, q_BnS.sum(-1, keepdim=True, dtype=wide))
    return torch.stack(tokens, -1), torch.stack(exist, -1)


def best(z_BnV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k tokens of largest logit, best first, and which of them are possible at all."""
    missing = max(k - z_BnV.shape[-1], 0)
    top_Bnk, token_Bnk = z_BnV.topk(k - missing)
    return pad(token_Bnk, (0, missing)), pad(top_Bnk > -torch.inf, (0, missing), value=False)


def _wide(x: Tensor) -> torch.dtype:
    """What sums run in: float64 where the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _at(cdf_BnV: Tensor, threshold_Bnk: Tensor) -> Tensor:
    token_Bnk = torch.searchsorted(cdf_BnV, threshold_Bnk, right=True)
    return token_Bnk.clamp(max=cdf_BnV.shape[-1] - 1)
