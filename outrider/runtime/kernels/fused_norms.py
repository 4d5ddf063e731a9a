"""RMS norms on a GPU, each by one kernel.

    y = x / √(mean(x²) + ε) · w            or, in Gemma's models,            · (1 + w)

Models of ``transformers`` compute it by eight operators, and a layer has two norms or more, so that
norms launch a third of the kernels of a forward pass. Torch has a kernel for the first formula, and
we have one for both that is faster for few tokens. They round once, at the end; the operators of
most models round before the product with w, too.
"""

from collections.abc import Callable, Sequence
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

Norm = Callable[[Tensor, Tensor, float, float], Tensor]
"""Computes the formula of x (..., H), w (H,), ε, and what is added to w."""


def norm_by_torch(x: Tensor, weight: Tensor, epsilon: float, added: float) -> Tensor:
    """Torch's kernel; nothing is added to the weight."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def use_fused_norms(
    module: nn.Module, norm: Norm = norm_by_torch, added: Sequence[float] = (0.0,)
) -> int:
    """Lets the norms of a module run by one kernel where they compute the same formula; returns how
    many do.

    Args:
        module: a model; the methods of its norms are replaced, whatever device it is on.
        norm: the kernel.
        added: what it can add to weights.
    """
    found = 0
    for each in module.modules():
        mine = added_to_weight(each, norm, added)
        if mine is not None:
            replace_forward(each, _forward, norm=norm, added=mine)
            found += 1
    return found


@torch.no_grad()
def added_to_weight(
    module: Any, norm: Norm = norm_by_torch, added: Sequence[float] = (0.0,)
) -> float | None:
    """What a module adds to its weight; None if it does not compute the formula with any of these.
    Arguments as of :func:`use_fused_norms`."""
    weight, epsilon = getattr(module, "weight", None), epsilon_of(module)
    is_vector = isinstance(weight, Tensor) and weight.dim() == 1 and weight.is_floating_point()
    if not is_vector or epsilon is None or not type(module).__name__.endswith("RMSNorm"):
        return None
    x_NH = example(module.weight)
    wanted = type(module).forward(module, x_NH)
    same = (each for each in added if agree(norm(x_NH, module.weight, epsilon, each), wanted))
    return next(same, None)


def epsilon_of(module: nn.Module | None) -> float | None:
    """ε of a norm; None for other modules."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _forward(module: Any, hidden_states: Tensor, *, norm: Norm, added: float) -> Tensor:
    epsilon = epsilon_of(module)
    if epsilon is None or runs_own_code(module):
        found: Tensor = type(module).forward(module, hidden_states)
        return found
    return norm(hidden_states, module.weight, epsilon, added)
