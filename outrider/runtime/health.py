"""Which logits are healthy.

A model may mask tokens by -inf or the least finite number, as Chameleon masks image tokens. NaN,
+inf and positions at which every token is masked are damage.

Legend: B rows, N query tokens, V vocabulary.
"""

import math

import torch
from torch import Tensor


def health_of(logits_BNV: Tensor) -> Tensor:
    """The sum of each query token's largest logit, (B,): finite iff all logits of a row are
    healthy."""
    return logits_BNV.amax(-1).sum(1, dtype=torch.float32)


def deviation(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """The largest difference between two tensors of logits, infinite if they mask different tokens,
    and the largest absolute value of the wanted ones. Masked logits do not count."""
    masked = torch.finfo(wanted.dtype).min / 2
    hidden = wanted < masked
    if not torch.equal(hidden, found < masked):
        return math.inf, 0.0
    off = (found - wanted).masked_fill(hidden, 0)
    return float(off.abs().max()), float(wanted.masked_fill(hidden, 0).abs().max())
