"""RMS norms on a GPU, each by one kernel.

    y = x / √(mean(x²) + ε) · w

Models of ``transformers`` compute it by eight operators, and a layer has two norms, so that norms
launch a third of the kernels of a forward pass. Torch has a kernel for the formula. It rounds once,
at the end; the operators round before the product with w, too.
"""

from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NUM_EXAMPLES = 4
_MOST_ROUNDINGS = 4
"""By how many ε, of the largest number, the results of a norm may differ from the kernel's."""


def use_fused_norms(module: nn.Module) -> int:
    """Lets the norms of a module run by torch's kernel where they compute the same formula; returns
    how many do.

    Args:
        module: a model; the methods of its norms are replaced, whatever device it is on.
    """
    norms = [each for each in module.modules() if _could_be_norm(each)]
    fused = [each for each in norms if _computes_the_formula(each)]
    for each in fused:
        vars(each)["forward"] = MethodType(_forward, each)
    return len(fused)


def _could_be_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_vector = isinstance(weight, Tensor) and weight.dim() == 1 and weight.is_floating_point()
    return is_vector and type(module).__name__.endswith("RMSNorm") and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


@torch.no_grad()
def _computes_the_formula(module: Any) -> bool:
    weight: Tensor = module.weight
    example = _example(weight.shape[0]).to(weight.device, weight.dtype)
    wanted = type(module).forward(module, example).float()
    found = _forward(module, example).float()
    allowed = _MOST_ROUNDINGS * torch.finfo(weight.dtype).eps * float(wanted.abs().max())
    return bool((found - wanted).abs().max() <= allowed)


@lru_cache(maxsize=4)
def _example(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    size = 2.0 ** torch.arange(_NUM_EXAMPLES)[:, None] / 4
    return size * torch.randn(_NUM_EXAMPLES, width, generator=generator)


def _forward(module: Any, hidden_states: Tensor) -> Tensor:
    shape = hidden_states.shape[-1:]
    return functional.rms_norm(hidden_states, shape, module.weight, _epsilon(module))
