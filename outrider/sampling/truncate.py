"""Which tokens top-k, top-p and min-p keep, with parameters per row.

Legend: B rows, M positions, V vocabulary, Z most probable tokens, selected by ``topk``.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_FIRST_RANKED = 256


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def per_row(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number per row, (B,). Cached, because parameters stay the same from round to round and a
    copy to a GPU would synchronise with it."""
    return torch.tensor(values, dtype=dtype, device=device)


def keep_top_k(z_BMV: Tensor, top_k: Sequence[int]) -> Tensor:
    """Keeps the logits that are not below the k-th largest, so ties survive (Fan et al., 2018); 0
    keeps all."""
    V = z_BMV.shape[-1]
    limits = [min(k, V) if k > 0 else V for k in top_k]
    most = max((k for k in limits if k < V), default=0)
    if most == 0:
        return torch.ones_like(z_BMV, dtype=torch.bool)
    ranked_BMZ = z_BMV.topk(most, dim=-1).values
    limit_B = per_row(tuple(limits), torch.int64, z_BMV.device)
    index_BM1 = (limit_B - 1).clamp(max=most - 1)[:, None, None].expand(*z_BMV.shape[:2], 1)
    keep_BMV = z_BMV >= ranked_BMZ.gather(-1, index_BM1)
    return keep_BMV | (limit_B == V)[:, None, None]


def keep_top_p(p_BMV: Tensor, top_p: Sequence[float], strict: Sequence[bool]) -> Tensor:
    """Keeps the nucleus: the smallest set of most probable tokens with mass ``top_p`` (Holtzman et
    al., ICLR 2020).

    A token is dropped if the mass ranked before it is at least ``top_p`` (``transformers``), or
    with ``strict`` if that mass exceeds ``top_p`` (the paper). Equal probabilities are ranked by
    token id. On a CPU only as many tokens are ranked as the mass requires; elsewhere finding that
    number would take a synchronisation, so all tokens are ranked. A row with ``top_p = 1`` keeps
    all tokens, whatever rounding makes of the cumulative sum.
    """
    V = p_BMV.shape[-1]
    limit_B11 = per_row(tuple(top_p), p_BMV.dtype, p_BMV.device)[:, None, None]
    strict_B11 = per_row(tuple(strict), torch.bool, p_BMV.device)[:, None, None]
    off_B11 = limit_B11 >= 1
    num_ranked = min(_FIRST_RANKED, V) if p_BMV.device.type == "cpu" else V
    while True:
        ranked_BMZ = p_BMV.topk(num_ranked, dim=-1).values
        before_BMZ = pad(ranked_BMZ.cumsum(-1)[..., :-1], (1, 0))
        dropped_BMZ = torch.where(strict_B11, before_BMZ > limit_B11, before_BMZ >= limit_B11)
        num_kept_BM1 = (~dropped_BMZ).sum(-1, keepdim=True).clamp(min=1)
        if num_ranked == V or bool((off_B11 | (num_kept_BM1 < num_ranked)).all()):
            break
        num_ranked = min(8 * num_ranked, V)
    least_BM1 = ranked_BMZ.gather(-1, num_kept_BM1 - 1)
    above_BMV = p_BMV > least_BM1
    tied_BMV = p_BMV == least_BM1
    num_tied_kept_BM1 = num_kept_BM1 - above_BMV.sum(-1, keepdim=True)
    return above_BMV | (tied_BMV & (tied_BMV.cumsum(-1) <= num_tied_kept_BM1)) | off_B11


def keep_min_p(p_BMV: Tensor, min_p: Sequence[float]) -> Tensor:
    """Keeps tokens at least ``min_p`` times as probable as the most probable one (Nguyen et al.,
    2024)."""
    fraction_B11 = per_row(tuple(min_p), p_BMV.dtype, p_BMV.device)[:, None, None]
    return p_BMV >= fraction_B11 * p_BMV.amax(-1, keepdim=True)
