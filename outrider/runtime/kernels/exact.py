"""Exact arithmetic: a token's bits do not depend on how many tokens share its forward pass.

torch computes the last elements of a buffer, those past the unrolled vector width, by other
instructions than the rest; which elements these are depends on the processor. So the forward passes
of an exact model consist of three kinds of operators, and no others:

    kernels     linear layers and attention; exponentials, activations, means and normalisation,
                which replace torch's own in exact mode
    moves       views, copies and gathers
    arithmetic  sums, products, quotients, roots and comparisons of single numbers, which
                IEEE 754 rounds the same way in a vector and alone

A compiled program consists of the same operators: :func:`use_exact_operators` puts the kernels into
its graph before it is compiled.
"""

import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.errors import UnsupportedModelError
from outrider.runtime.kernels.operators import FUNCTIONS

_DTYPES = (torch.float32, torch.bfloat16)  # what the kernels compute; others stay with torch

_MOVES = frozenset(
    "_assert_tensor_metadata _to_copy _unsafe_view alias arange as_strided broadcast_tensors "
    "broadcast_to cat chunk clone concat constant_pad_nd contiguous copy detach detach_ dropout "
    "embedding empty empty_like expand expand_as fill flatten flip full full_like gather index "
    "index_copy index_put index_select lift_fresh lift_fresh_copy mT masked_fill movedim narrow "
    "new_empty new_full new_ones new_zeros numpy_T ones ones_like pad permute repeat "
    "repeat_interleave reshape roll scatter select select_scatter slice slice_scatter split "
    "split_with_sizes squeeze stack sym_size t tile to transpose tril triu type_as unbind "
    "unflatten unsqueeze view view_as where zero zeros zeros_like".split()
)
_ARITHMETIC = frozenset(
    "__and__ __lshift__ __or__ __rshift__ __xor__ abs bitwise_and bitwise_not bitwise_or ceil "
    "clamp clamp_max clamp_min div eq floor floor_divide ge gt le logical_and logical_not "
    "logical_or lt maximum minimum mul ne neg relu round sign sqrt square trunc".split()
)
_SCALED_SUMS = frozenset(("add", "sub", "rsub"))
_PRODUCTS = frozenset(("bmm", "matmul", "mm"))


@contextmanager
def exact_mode() -> Iterator[None]:
    """In this thread, the kernels replace torch's operators. They must be loaded."""
    set_mode = _in_library("outrider_set_exact_mode")
    before = set_mode(True)
    try:
        yield
    finally:
        set_mode(before)


def is_exact_mode() -> bool:
    """Whether exact mode is on in this thread. The kernels must be loaded."""
    return bool(_in_library("outrider_is_exact_mode")())


@cache
def _in_library(name: str) -> Callable[..., bool]:
    function = ctypes.CDLL(None)[name]
    function.restype = ctypes.c_bool
    return function


def inexact_operator(run: Callable[[], object]) -> str | None:
    """The first operator of a call, within exact mode, whose bits may depend on how many tokens
    share a forward pass; None if there is none."""
    with _Watch() as watch:
        run()
    return watch.found


def use_exact_operators(program: ExportedProgram) -> ExportedProgram:
    """Replaces torch's operators by the kernels in an exported program, as exact mode does.

    Args:
        program: changed in place, and returned.

    Raises:
        UnsupportedModelError: an operator whose bits may depend on how many tokens share a forward
            pass.
    """
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            needed = _needed_for_logits(module.graph)
            for node in module.graph.nodes:
                if node.op == "call_function" and node in needed:
                    _use_kernel(node)
            module.recompile()
    return program


def _needed_for_logits(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the logits, the first output, and all writes to KV caches are computed from.

    The bits of other nodes, such as the health of the logits, may depend on the number of tokens.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs = pytree.tree_leaves(output.args)
    waiting = [*outputs[:1], *filter(_writes, graph.nodes)]
    needed: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return needed


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _use_kernel(node: fx.Node) -> None:
    args, kwargs = pytree.tree_map_only(fx.Node, _value, (node.args, node.kwargs))
    if kernel := _kernel_for(node.target, args, kwargs):
        name, more = kernel
        node.target = getattr(torch.ops.outrider, name).default
        node.args, node.kwargs = (node.args[0], *more(node.args, node.kwargs)), {}
    elif not _is_safe(node.target, args, kwargs):
        raise UnsupportedModelError(
            f"{node.target} computes bits that depend on how many tokens share a forward pass"
        )


def _value(node: fx.Node) -> Any:
    """The tensor, without data, that a node stands for."""
    return node.meta.get("val")


More = Callable[[Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]
"""From the arguments of torch's operator to those of the kernel, the first one excepted."""


def _kernel_for(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, More] | None:
    """The kernel that computes the same as an operator of torch, if there is one."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or not _is_ours(args):
        return None
    name = _name(target)
    if name == "gelu":
        return ("gelu_tanh" if kwargs.get("approximate") == "tanh" else name), _nothing
    if name in FUNCTIONS and target._overloadname == "default":
        return name, _nothing
    if str(target) == "aten.mean.dim" and kwargs.get("dtype") is None and _is_last(args):
        return name, _mean_arguments
    if name == "layer_norm" and len(args[1]) == 1:
        return name, _norm_arguments
    return None


def _nothing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def _is_last(args: Sequence[Any]) -> bool:
    """Whether a reduction runs over the last dimension only."""
    return list(args[1]) in ([-1], [args[0].ndim - 1])


def _mean_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return (args[2] if len(args) > 2 else False,)


def _norm_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    named = dict(zip(("weight", "bias", "eps"), args[2:], strict=False)) | dict(kwargs)
    return named.get("weight"), named.get("bias"), named.get("eps", 1e-5)


def _is_ours(args: Sequence[Any]) -> bool:
    x = args[0] if args else None
    return isinstance(x, Tensor) and x.dtype in _DTYPES and x.device.type == "cpu"


def _is_safe(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether each number of an operator's result depends on its own inputs only, to the bit."""
    if not isinstance(target, OpOverload):  # sizes, items of tuples, regions of a graph
        python = target is operator.getitem or getattr(target, "__module__", "") == "_operator"
        return python or isinstance(target, HigherOrderOperator)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if target.namespace == "outrider" or not any(x.is_floating_point() for x in tensors):
        return not any(x.is_complex() for x in tensors)
    if any(x.is_complex() for x in tensors):
        return False
    name = _name(target)
    if name in _SCALED_SUMS:
        return kwargs.get("alpha", 1) == 1
    if name == "pow":
        return args[1] in (2, 3)
    if name in ("rsqrt", "reciprocal"):
        return args[0].dtype == torch.float32  # in bfloat16 only a vector rounds in between
    if name in _PRODUCTS:
        return args[0].shape[-1] == 1
    return name in _MOVES or name in _ARITHMETIC


def _name(target: OpOverload) -> str:
    """An operator's name without its namespace and the underscore of in-place operators."""
    name = target._schema.name.split("::")[-1]
    return name if name.startswith("__") else name.removesuffix("_")


class _Watch(TorchDispatchMode):
    """Watches the operators that run within exact mode.

    Attributes:
        found: the first operator whose bits may depend on how many tokens share a forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        watched = self.found is None and is_exact_mode()
        if watched and not _is_safe(func, args, kwargs):
            self.found = str(func)
        return func(*args, **kwargs)
