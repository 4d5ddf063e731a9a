"""Calibrates predicted probabilities of acceptance by temperature scaling.

Guo, Pleiss, Sun and Weinberger, "On Calibration of Modern Neural Networks", ICML 2017:

    a = sigmoid(z / T),   T = argmin BCE(a, α) on data that was not trained on

Dividing the weights of a linear confidence by T is the same, so a calibrated head is an ordinary
head. T changes no order: thresholds on a mean what they say, and pick among the same drafts.

Legend: N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

_MOST_STEPS = 60
_RANGE = (-5.0, 5.0)  # of log T


def temperature_of(logits_N: Tensor, targets_N: Tensor) -> float:
    """T, by bisection: in 1/T the loss is convex, and its slope changes sign at the minimum.

    Args:
        logits_N: z.
        targets_N: probabilities of acceptance α, or 0 and 1 for what was observed.
    """
    z_N, alpha_N = logits_N.double(), targets_N.double().clamp(0, 1)
    low, high = _RANGE
    for _ in range(_MOST_STEPS):
        middle = (low + high) / 2
        scaled_N = z_N * torch.tensor(-middle).double().exp()
        too_sure = ((scaled_N.sigmoid() - alpha_N) * z_N).sum() > 0
        low, high = (middle, high) if too_sure else (low, middle)
    return float(torch.tensor((low + high) / 2).double().exp())


def expected_calibration_error(probs_N: Tensor, targets_N: Tensor, num_bins: int = 10) -> float:
    """Mean over tokens of |mean prediction - mean target| of the token's bin of predictions."""
    bin_N = (probs_N * num_bins).long().clamp(0, num_bins - 1)
    error = torch.zeros((), dtype=torch.float64)
    for number in range(num_bins):
        inside_N = bin_N == number
        if bool(inside_N.any()):
            gap = probs_N[inside_N].double().mean() - targets_N[inside_N].double().mean()
            error = error + inside_N.double().mean() * gap.abs()
    return float(error)


def calibration_loss(logits_N: Tensor, targets_N: Tensor, temperature: float) -> float:
    """The mean cross-entropy at a temperature, which :func:`temperature_of` minimises."""
    scaled_N = logits_N.double() / temperature
    return float(binary_cross_entropy_with_logits(scaled_N, targets_N.double()))
