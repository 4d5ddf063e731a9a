"""Which tokens top-k, top-p and min-p keep; each row of a batch with its own parameter.

Legend: B rows, M places, V vocabulary, C candidates looked at.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_FIRST_CANDIDATES = 256


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number per row, (B,). Kept, since parameters stay the same from round to round, and a copy
    to a GPU would wait for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def keep_top_k(z_BMV: Tensor, top_k: Sequence[int]) -> Tensor:
    """Logits not below the k-th largest (Fan et al., 2018); ties survive; 0 keeps all."""
    V = z_BMV.shape[-1]
    limits = [min(k, V) if k > 0 else V for k in top_k]
    most = max((k for k in limits if k < V), default=0)
    if most == 0:
        return torch.ones_like(z_BMV, dtype=torch.bool)
    ranked_BMC = z_BMV.topk(most, dim=-1).values
    limit_B = column(tuple(limits), torch.int64, z_BMV.device)
    index_BM1 = (limit_B - 1).clamp(max=most - 1)[:, None, None].expand(*z_BMV.shape[:2], 1)
    keep_BMV = z_BMV >= ranked_BMC.gather(-1, index_BM1)
    return keep_BMV | (limit_B == V)[:, None, None]


def keep_top_p(p_BMV: Tensor, top_p: Sequence[float], strict: Sequence[bool]) -> Tensor:
    """The nucleus (Holtzman et al., ICLR 2020): the fewest best tokens that hold mass ``top_p``.

    A token is dropped when the mass ranked before it is at least ``top_p`` (``transformers``), or
    with ``strict`` when it exceeds it (the paper). Equal probabilities rank by token id. Ranks only
    as many candidates as the mass needs, where the device can tell without a synchronisation.
    A row with ``top_p = 1`` keeps all, whatever rounding makes of the sum.
    """
    V = p_BMV.shape[-1]
    limit_B11 = column(tuple(top_p), p_BMV.dtype, p_BMV.device)[:, None, None]
    strict_B11 = column(tuple(strict), torch.bool, p_BMV.device)[:, None, None]
    off_B11 = limit_B11 >= 1
    num_candidates = min(_FIRST_CANDIDATES, V) if p_BMV.device.type == "cpu" else V
    while True:
        ranked_BMC = p_BMV.topk(num_candidates, dim=-1).values
        before_BMC = pad(ranked_BMC.cumsum(-1)[..., :-1], (1, 0))
        dropped_BMC = torch.where(strict_B11, before_BMC > limit_B11, before_BMC >= limit_B11)
        num_kept_BM1 = (~dropped_BMC).sum(-1, keepdim=True).clamp(min=1)
        if num_candidates == V or bool((off_B11 | (num_kept_BM1 < num_candidates)).all()):
            break
        num_candidates = min(8 * num_candidates, V)
    least_BM1 = ranked_BMC.gather(-1, num_kept_BM1 - 1)
    above_BMV = p_BMV > least_BM1
    tied_BMV = p_BMV == least_BM1
    num_tied_kept_BM1 = num_kept_BM1 - above_BMV.sum(-1, keepdim=True)
    return above_BMV | (tied_BMV & (tied_BMV.cumsum(-1) <= num_tied_kept_BM1)) | off_B11


def keep_min_p(p_BMV: Tensor, min_p: Sequence[float]) -> Tensor:
    """Tokens at least ``min_p`` times as probable as the best (Nguyen et al., 2024)."""
    fraction_B11 = column(tuple(min_p), p_BMV.dtype, p_BMV.device)[:, None, None]
    return p_BMV >= fraction_B11 * p_BMV.amax(-1, keepdim=True)
