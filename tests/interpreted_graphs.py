"""Graphs without a compiler: the program that would be compiled, run by torch."""

from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export import ExportedProgram

from outrider.models.package import Graph


def interpreted(module: nn.Module, trace: Callable[[], ExportedProgram]) -> Graph:
    """A graph run by torch itself: what is compiled, without what compiles."""
    program = trace()
    run, spec = program.module(check_guards=False), program.call_spec.in_spec

    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments, _ = pytree.tree_unflatten(inputs, spec)
        return list(run(*arguments))

    return graph
