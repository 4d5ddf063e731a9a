"""Inverse-CDF sampling from uniform numbers that somebody else drew.

Legend: B rows, V vocabulary.
"""

import torch
from torch import Tensor


def draw(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """Index v with probability proportional to ``weights[b, v]``, shape (B,).

    Weights are non-negative and need no normalisation; a token of weight zero is never drawn.
    Sums run in float64 where the device has it.
    """
    dtype = torch.float32 if weights_BV.device.type == "mps" else torch.float64
    cdf_BV = weights_BV.cumsum(-1, dtype=dtype)
    threshold_B1 = u_B.to(dtype)[:, None] * cdf_BV[:, -1:]
    index_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True)
    return index_B1[:, 0].clamp(max=weights_BV.shape[-1] - 1)
