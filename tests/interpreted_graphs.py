"""Graphs without a compiler: the program that would be compiled, run by torch."""

from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram

from outrider.models.package import Graph
from outrider.models.traced import ChainPass, TreePass


def interpreted(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Graph:
    """A graph run by torch itself: what is compiled, without what compiles."""
    program = trace()
    run, spec = program.module(check_guards=False), program.call_spec.in_spec

    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments, _ = pytree.tree_unflatten(inputs, spec)
        return list(run(*arguments))

    return graph


def untraced(each: nn.Module) -> Graph:
    """A pass, or a rule's program, called as a graph: without tracing it either."""

    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not isinstance(each, TreePass):
            return list(each(*inputs))
        moving, slabs = inputs[: each.num_moving], inputs[each.num_moving :]
        half = len(slabs) // 2
        if not isinstance(each, ChainPass):  # its masks are a list
            return list(each(*moving[:3], moving[3:], slabs[:half], slabs[half:]))
        return list(each(*moving, slabs[:half], slabs[half:]))

    return graph
