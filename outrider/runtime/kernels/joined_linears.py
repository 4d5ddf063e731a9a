"""Linear layers with the same input as one matrix product: query, key and value projections, or
gate and up. A product over few tokens takes as long as its weights are read, and a GPU reads one
large matrix faster than several small ones.

The weights move to one place in memory, one behind the other; each layer keeps its own parameter,
which is a part of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.kernels.replaced_methods import has_hooks


def can_join(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are plain linear layers with inputs of one width, of one dtype, on one device,
    all of them with a bias or none, whose calls do nothing else."""
    kinds = {_kind(layer) for layer in layers}
    return len(kinds) == 1 and None not in kinds


def _kind(layer: nn.Module | None) -> tuple[object, ...] | None:
    """What layers that can be joined have in common; None for a layer that cannot be."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or has_hooks(layer):
        return None
    weight = layer.weight
    if weight.is_meta:
        return None
    return weight.shape[1], weight.dtype, weight.device, layer.bias is None


def join(layers: Sequence[nn.Linear]) -> None:
    """Moves the parameters of layers together, unless they are. The layers can be joined."""
    for parameters in _parameters(layers):
        if _together(parameters) is None:
            sizes = [each.shape[0] for each in parameters]
            parts = torch.cat([each.detach() for each in parameters]).split(sizes)
            for each, part in zip(parameters, parts, strict=True):
                each.data = part


def joined_linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """The outputs of layers for the same input, side by side. Where their parameters are no longer
    together, since others took their place, each layer runs by itself."""
    found = [_together(each) for each in _parameters(layers)]
    if any(each is None for each in found):
        return torch.cat([layer(x) for layer in layers], -1)
    return functional.linear(x, *found)  # type: ignore[arg-type]  # none is None


def _parameters(layers: Sequence[nn.Linear]) -> list[list[Tensor]]:
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return [weights, biases] if biases else [weights]


def _together(parameters: Sequence[Tensor]) -> Tensor | None:
    """All of them as one tensor, if they are one behind the other in memory."""
    first = parameters[0]
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for each in parameters:
        if each.data_ptr() != place or each.untyped_storage().data_ptr() != storage:
            return None
        place += each.nbytes
    rows = sum(each.shape[0] for each in parameters)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
