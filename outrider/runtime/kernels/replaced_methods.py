"""Modules whose forward method is replaced by one that computes the same formula by fewer kernels.

Whether it does is tested on numbers: the class's method and ours get the same examples.
"""

from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_NUM_EXAMPLES = 4
_MOST_ROUNDINGS = {2: 4, 4: 256, 8: 256}
"""By how many ε, of the largest number, the results may differ, by the bytes of a number: in half
precisions what counts is roundings of results, in others the order of sums."""


class Forward(Protocol):
    """A forward method; keywords that are bound to it say which variant of the formula it is."""

    def __call__(self, module: Any, *arguments: Any, **keywords: Any) -> Any: ...


def replace_forward(module: nn.Module, forward: Forward, **variant: Any) -> None:
    """Lets an instance run another method, and copies of it run that method on themselves."""
    vars(module)["forward"] = partial(forward, module, **variant)


def variant_of(module: nn.Module | None, forward: Forward) -> dict[str, Any] | None:
    """The keywords of the variant that a module was given with this method; None where it runs
    another one, or where hooks are called with it."""
    given = vars(module).get("forward") if module is not None else None
    if module is None or not isinstance(given, partial) or given.func is not forward:
        return None
    return None if has_hooks(module) else given.keywords


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module calls functions of others."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def runs_own_code(module: nn.Module) -> bool:
    """Whether a module runs its class's method: kernels have no gradients, and no compiler reads
    them."""
    return module.training or torch.is_grad_enabled() or torch.compiler.is_compiling()


def example(like: Tensor) -> Tensor:
    """Numbers of various sizes, (4, H), of the device and dtype of a tensor (..., H)."""
    return _example(like.shape[-1]).to(like.device, like.dtype)


@lru_cache(maxsize=4)
def _example(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    size = 2.0 ** torch.arange(_NUM_EXAMPLES)[:, None] / 4
    return size * torch.randn(_NUM_EXAMPLES, width, generator=generator)


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether two results differ by roundings only."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    allowed = (
        _MOST_ROUNDINGS[wanted.dtype.itemsize]
        * torch.finfo(wanted.dtype).eps
        * float(wanted.abs().max())
    )
    return bool((found.double() - wanted.double()).abs().max() <= allowed)
