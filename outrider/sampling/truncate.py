"""Which tokens top-k, top-p and min-p keep, with parameters per row.

The functions ``keep_…`` read their parameters on the host and do no more than these require.
:func:`truncated` has them as tensors and reads nothing on the host, so that compiled programs can
consist of it; on a CPU a kernel replaces it (``runtime/kernels/truncation.py``).

Legend: B rows, M positions, V vocabulary, Z most probable tokens, selected by ``topk``, R tokens
in the order of their probabilities.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_FIRST_RANKED = 256


class Truncation(NamedTuple):
    """The parameters of the rows of a batch, each (B,).

    Attributes:
        top_k_B: int64; 0 keeps all tokens.
        top_p_B: float32; 1 keeps all.
        strict_B: the convention of top-p, as of :func:`keep_top_p`.
        min_p_B: float32; 0 keeps all.
    """

    top_k_B: Tensor
    top_p_B: Tensor
    strict_B: Tensor
    min_p_B: Tensor

    @classmethod
    def of(
        cls,
        top_k: Sequence[int],
        top_p: Sequence[float],
        strict: Sequence[bool],
        min_p: Sequence[float],
        device: torch.device,
    ) -> "Truncation":
        """From the parameters of each row."""
        return cls(
            per_row(tuple(top_k), torch.int64, device),
            per_row(tuple(top_p), torch.float32, device),
            per_row(tuple(strict), torch.bool, device),
            per_row(tuple(min_p), torch.float32, device),
        )


Truncate = Callable[[Tensor, Truncation], Tensor]
"""Restricts distributions (B, M, V) to the tokens that each row's parameters keep, and renormalises
them. Rows whose parameters keep all tokens stay as they are."""


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


def truncated(p_BMV: Tensor, by: Truncation) -> Tensor:
    """The :data:`Truncate` that ranks all tokens: top-k, then top-p, then min-p.

    Top-k compares probabilities, so that logits which differ by less than a probability can
    express are ties.
    """
    V = p_BMV.shape[-1]
    top_k_B11, top_p_B11, strict_B11, min_p_B11 = (each[:, None, None] for each in by)
    ranked_BMR, order_BMR = p_BMV.sort(dim=-1, descending=True, stable=True)
    k_B11 = torch.where(top_k_B11 > 0, top_k_B11.clamp(max=V), V)
    kth_BM1 = ranked_BMR.gather(-1, (k_B11 - 1).expand(-1, p_BMV.shape[1], -1))
    kept_BMR = _normalised(ranked_BMR.masked_fill(ranked_BMR < kth_BM1, 0.0))
    before_BMR = pad(kept_BMR.cumsum(-1)[..., :-1], (1, 0))
    outside_BMR = torch.where(strict_B11, before_BMR > top_p_B11, before_BMR >= top_p_B11)
    outside_BMR = outside_BMR & (before_BMR > 0) & (top_p_B11 < 1)
    outside_BMR = outside_BMR | (ranked_BMR < min_p_B11 * ranked_BMR[..., :1])
    kept_BMR = _normalised(kept_BMR.masked_fill(outside_BMR, 0.0))
    kept_BMV = torch.zeros_like(p_BMV).scatter(-1, order_BMR, kept_BMR)
    off_B11 = (k_B11 == V) & (top_p_B11 >= 1) & (min_p_B11 <= 0)
    return torch.where(off_B11, p_BMV, kept_BMV)


def _normalised(weights_BMR: Tensor) -> Tensor:
    return weights_BMR / weights_BMR.sum(-1, keepdim=True)
