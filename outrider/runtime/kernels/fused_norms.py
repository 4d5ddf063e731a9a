"""RMS norms on a GPU, each by one kernel.

    y = x / √(mean(x²) + ε) · w

Models of ``transformers`` compute it by eight operators, and a layer has two norms, so that norms
launch a third of the kernels of a forward pass. Torch has a kernel for the formula, and we have one
that is faster for few tokens. They round once, at the end; the operators round before the product
with w, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.kernels.replaced_methods import (
    agree,
    example,
    replace_forward,
    runs_own_code,
)

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Computes the formula of x (..., H), w (H,) and ε."""


def norm_by_torch(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Torch's kernel."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def use_fused_norms(module: nn.Module, norm: Norm = norm_by_torch) -> int:
    """Lets the norms of a module run by one kernel where they compute the same formula; returns how
    many do.

    Args:
        module: a model; the methods of its norms are replaced, whatever device it is on.
        norm: the kernel.
    """
    norms = [each for each in module.modules() if is_rms_norm(each, norm)]
    for each in norms:
        replace_forward(each, _forward, norm=norm)
    return len(norms)


@torch.no_grad()
def is_rms_norm(module: Any, norm: Norm = norm_by_torch) -> bool:
    """Whether a module computes the formula."""
    weight, epsilon = getattr(module, "weight", None), epsilon_of(module)
    is_vector = isinstance(weight, Tensor) and weight.dim() == 1 and weight.is_floating_point()
    if not is_vector or epsilon is None or not type(module).__name__.endswith("RMSNorm"):
        return False
    x_NH = example(module.weight)
    return agree(norm(x_NH, module.weight, epsilon), type(module).forward(module, x_NH))


def epsilon_of(module: nn.Module | None) -> float | None:
    """ε of a norm; None for other modules."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _forward(module: Any, hidden_states: Tensor, *, norm: Norm) -> Tensor:
    epsilon = epsilon_of(module)
    if epsilon is None or runs_own_code(module):
        found: Tensor = type(module).forward(module, hidden_states)
        return found
    return norm(hidden_states, module.weight, epsilon)
