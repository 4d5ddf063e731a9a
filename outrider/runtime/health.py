"""Which logits are healthy: a model may mask a token by -inf or the least finite number.

Chameleon masks its image tokens that way. NaN, +inf and positions at which no token is left are
damage.

Legend: B rows, N nodes of a forward pass, V vocabulary.
"""

import math

import torch
from torch import Tensor


def health_of(logits_BNV: Tensor) -> Tensor:
    """The sum of each node's largest logit, (B,), finite iff all of a row are healthy."""
    return logits_BNV.amax(-1).sum(1, dtype=torch.float32)


def deviation(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest difference of two tensors of logits, infinite where they mask other tokens, and the
    largest size of the wanted ones; of the logits that are not masked."""
    masked = torch.finfo(wanted.dtype).min / 2
    hidden = wanted < masked
    if not torch.equal(hidden, found < masked):
        return math.inf, 0.0
    off = (found - wanted).masked_fill(hidden, 0)
    return float(off.abs().max()), float(wanted.masked_fill(hidden, 0).abs().max())
