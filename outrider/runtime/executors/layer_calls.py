"""How a model calls its decoder layers: with which arguments, and which sizes of them vary.

Families of models tell their layers different things. So a model is recorded in two forward passes
of different sizes: what is the same in both belongs to the model, and a size that differs is that
of the rows, of the query tokens or of the slots that are read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import (
    SequenceKey,
    TreeSpec,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)
from transformers.cache_utils import Cache

from outrider.core.errors import UnsupportedModelError
from outrider.runtime.executors.traced import QUERIES, SPAN, TreeForward
from outrider.runtime.executors.traced_cache import ROWS, KVBuffers
from outrider.runtime.hf.views import StandIn, with_parts

SIZES = 3, 5, 23, 40
"""Rows, query tokens, span and slots of the examples: all differ, lest two be taken for one."""

_OTHER_SIZES = 2, 4, 17, 40
_VARYING = dict(zip(zip(SIZES, _OTHER_SIZES, strict=True), (ROWS, QUERIES, SPAN), strict=False))
"""What varies, by a size of a tensor in both forward passes."""

TENSOR, CACHE = "<tensor>", "<KV cache>"

Path = tuple[int | str, ...]


class Arguments(NamedTuple):
    """Arguments or results without their tensors.

    Attributes:
        leaves: all others, with ``TENSOR`` and ``CACHE`` in the places of tensors and KV caches.
        paths: the indices and names that lead to each leaf.
        nesting: how they are nested.
    """

    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    nesting: TreeSpec

    @classmethod
    def of(cls, value: Any) -> "Arguments":
        pairs, nesting = tree_flatten_with_path(value)
        leaves = tuple(_marked(leaf) for _, leaf in pairs)
        return cls(leaves, tuple(tuple(map(_index, path)) for path, _ in pairs), nesting)

    def paths_to(self, what: str) -> list[Path]:
        """The paths to all tensors, or to all KV caches."""
        return [path for path, leaf in zip(self.paths, self.leaves, strict=True) if leaf is what]

    def filled(self, tensors: Sequence[Tensor], cache: Cache | None = None) -> Any:
        """The value again, with these tensors and this cache."""
        if self.leaves == (TENSOR,) and self.nesting.is_leaf():
            return tensors[0]
        following = iter(tensors)
        leaves = [
            next(following) if leaf is TENSOR else cache if leaf is CACHE else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.nesting)


class LayerCall(NamedTuple):
    """How a model calls a decoder layer.

    Attributes:
        arguments: a tuple of positional ones and a dictionary of those with names.
        results: what the layer returns.
        tensors: examples of the tensors among the arguments.
        sizes: by tensor, which of its sizes vary.
    """

    arguments: Arguments
    results: Arguments
    tensors: list[Tensor]
    sizes: list[dict[int, Dim]]


def layer_calls(
    each: TreeForward, layers: Sequence[nn.Module], buffers: KVBuffers
) -> list[LayerCall]:
    """How a forward pass calls each of the model's layers.

    Args:
        each: the forward pass of a tree, whose masks are given.
        layers: the decoder layers.
        buffers: keys and values like those that it runs over.

    Raises:
        UnsupportedModelError: a layer is called in a way that no program can take the place of.
    """
    first, second = (_recorded(each, layers, buffers, sizes) for sizes in (SIZES, _OTHER_SIZES))
    return [_call(first.get(layer), second.get(layer)) for layer in layers]


def at(value: Any, path: Path) -> Any:
    """What a path leads to."""
    for key in path:
        value = value[key]
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of nested arguments or results, in the order of ``Arguments``."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Recorded(NamedTuple):
    arguments: Any
    results: Any


def _recorded(
    each: TreeForward, layers: Sequence[nn.Module], buffers: KVBuffers, sizes: tuple[int, ...]
) -> dict[nn.Module, _Recorded]:
    """What each layer was given and returned in a forward pass of these sizes."""
    found: dict[nn.Module, _Recorded] = {}

    def recording(layer: nn.Module) -> nn.Module:
        def forward(*args: Any, **kwargs: Any) -> Any:
            results = layer(*args, **kwargs)
            found[layer] = _Recorded((args, kwargs), results)
            return results

        return StandIn(layer, forward)

    view = with_parts(each.module, {layer: recording(layer) for layer in layers})
    with torch.no_grad():
        TreeForward(view, each.spec)(*each.inputs(buffers, *sizes))
    return found


def _call(one: _Recorded | None, other: _Recorded | None) -> LayerCall:
    if one is None or other is None:
        raise UnsupportedModelError("a forward pass leaves a layer out")
    arguments, results = Arguments.of(one.arguments), Arguments.of(one.results)
    if arguments != Arguments.of(other.arguments) or arguments.leaves.count(CACHE) != 1:
        raise UnsupportedModelError("a layer is told different things in different forward passes")
    if not all(leaf is TENSOR or leaf is None for leaf in results.leaves):
        raise UnsupportedModelError("a layer returns more than tensors")
    tensors = tensors_of(one.arguments)
    pairs = zip(tensors, tensors_of(other.arguments), strict=True)
    return LayerCall(arguments, results, tensors, [_varying(*pair) for pair in pairs])


def _varying(one: Tensor, other: Tensor) -> dict[int, Dim]:
    """Which sizes of a tensor vary, from the tensor in both forward passes."""
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    different = {index: pair for index, pair in pairs if pair[0] != pair[1]}
    if not set(different.values()) <= set(_VARYING):
        raise UnsupportedModelError(f"a tensor of {tuple(one.shape)} among a layer's arguments")
    return {index: _VARYING[pair] for index, pair in different.items()}


def _index(key: Any) -> int | str:
    index: int | str = key.idx if isinstance(key, SequenceKey) else key.key
    return index


def _marked(leaf: Any) -> Any:
    return TENSOR if isinstance(leaf, Tensor) else CACHE if isinstance(leaf, Cache) else leaf
