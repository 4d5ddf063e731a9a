"""Linear layers with the same input as one matrix product: query, key and value projections, or
gate and up. A product over few tokens takes as long as its weights are read, and a GPU reads one
large matrix faster than several small ones.

The weights move to one place in memory, one behind the other; each layer keeps its own parameters,
which are parts of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.runtime.kernels.few_bits_linear import FewBitsLinear
from outrider.runtime.kernels.replaced_methods import example, has_hooks

Linear = nn.Linear | FewBitsLinear


def can_join(layers: Sequence[nn.Module | None]) -> bool:
    """Whether these are linear layers with inputs of one width, of one dtype and as many bits, on
    one device, all of them with a bias or none, whose calls do nothing else."""
    kinds = {_kind(layer) for layer in layers}
    return len(kinds) == 1 and None not in kinds


def _kind(layer: nn.Module | None) -> tuple[object, ...] | None:
    """What layers that can be joined have in common; None for a layer that cannot be."""
    if layer is None or "forward" in vars(layer) or has_hooks(layer):
        return None
    if isinstance(layer, FewBitsLinear):
        bits = layer.bits, layer.weight.shape[0], layer.offset_GN is None
        return layer.in_features, *bits, layer.dtype, layer.weight.device, layer.bias is None
    if type(layer) is not nn.Linear or layer.weight.is_meta:
        return None
    return layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None


def example_inputs(layer: Linear) -> Tensor:
    """Inputs of various sizes for a layer, (4, K)."""
    dtype = layer.dtype if isinstance(layer, FewBitsLinear) else layer.weight.dtype
    return example(layer.weight.new_empty(layer.in_features, dtype=dtype))


def join(layers: Sequence[Any]) -> None:
    """Moves the parameters of layers together, unless they are. The layers can be joined."""
    for parameters, dim in _parameters(layers).values():
        if _together(parameters, dim) is None:
            sizes = [each.shape[dim] for each in parameters]
            parts = torch.cat([each.detach() for each in parameters], dim).split(sizes, dim)
            for each, part in zip(parameters, parts, strict=True):
                each.data = part


def joined_linear(x: Tensor, layers: Sequence[Any]) -> Tensor:
    """The outputs of layers for the same input, side by side. Where their parameters are no longer
    together, since others took their place, each layer runs by itself."""
    found = {name: _together(*each) for name, each in _parameters(layers).items()}
    if any(each is None for each in found.values()):
        return torch.cat([layer(x) for layer in layers], -1)
    product: Any = functional.linear
    if isinstance(layers[0], FewBitsLinear):
        product = layers[0].product
    joined: Tensor = product(x, **found)
    return joined


def _parameters(layers: Sequence[Any]) -> dict[str, tuple[list[Tensor], int]]:
    """What the layers have each, by name, with the dimension of their outputs."""
    dims = {"weight": 0, "bias": 0}
    if isinstance(layers[0], FewBitsLinear):
        dims = {"weight": 1, "scale_GN": 1, "offset_GN": 1, "bias": 0}
    return {
        name: ([getattr(layer, name) for layer in layers], dim)
        for name, dim in dims.items()
        if getattr(layers[0], name) is not None
    }


def _together(parameters: Sequence[Tensor], dim: int) -> Tensor | None:
    """All of them as one tensor, if they are one behind the other in memory."""
    first = parameters[0]
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for each in parameters:
        if each.data_ptr() != place or each.untyped_storage().data_ptr() != storage:
            return None
        if each.stride() != first.stride():
            return None
        place += each.shape[dim] * each.stride(dim) * each.itemsize
    size = list(first.shape)
    size[dim] = sum(each.shape[dim] for each in parameters)
    return first.detach().as_strided(size, first.stride())
