"""Divergences between the target distribution p and the output distribution π.

Legend: V vocabulary; leading dimensions broadcast.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergences:
    """Four divergences, in float64; the KL divergences in nats.

    Attributes:
        kl: KL(p‖π) = Σ p ln(p/π), infinite where p > 0 = π.
        rkl: KL(π‖p), infinite where π > 0 = p.
        tv: ½ Σ |p - π|.
        chi2: χ²(p‖π) = Σ p²/π - 1, infinite where p > 0 = π.
    """

    kl: Tensor
    rkl: Tensor
    tv: Tensor
    chi2: Tensor


def divergences(p_V: Tensor, pi_V: Tensor) -> Divergences:
    """The four divergences of two normalised distributions over the last dimension."""
    p_V, pi_V = p_V.double(), pi_V.double()
    difference_V = p_V - pi_V
    return Divergences(
        _kl(p_V, pi_V),
        _kl(pi_V, p_V),
        0.5 * difference_V.abs().sum(-1),
        torch.where(difference_V == 0, 0.0, difference_V * (difference_V / pi_V)).sum(-1),
    )


def _kl(a_V: Tensor, b_V: Tensor) -> Tensor:
    return (torch.xlogy(a_V, a_V) - torch.xlogy(a_V, b_V)).sum(-1).clamp(min=0)
