"""Traces modules to programs, without work of torch that serves nothing here."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
import torch.fx.config
from torch import nn
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from outrider.imports.garbage import collection_paused
from outrider.runtime.executors.size_arithmetic import size_arithmetic_kept


def export(module: nn.Module, inputs: Sequence[Any], sizes: Sequence[Any]) -> ExportedProgram:
    """The program of a module.

    Args:
        module: what the program computes.
        inputs: examples.
        sizes: by input, which of its sizes vary: the ``dynamic_shapes`` of ``torch.export``.

    Raises:
        Exception: whatever the tracer raises, which is of many kinds.
    """
    with torch.no_grad(), quick_tracing():
        return torch.export.export(module, tuple(inputs), dynamic_shapes=tuple(sizes), strict=False)


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Within it, torch traces drafts in two thirds of the time, and models no more slowly. It
    computes arithmetic of sizes once (``size_arithmetic.py``), and does not

    - write the Python code of a graph whenever a pass has changed the graph, but when it is run,
    - keep the results of operators by the symbolic sizes of their inputs, which takes at least as
      long as computing them again,
    - note for each node of a graph where it is in the model's code,
    - ask for each result whether its memory is contiguous, which nothing here reads,
    - search for cyclic garbage.
    """
    with ExitStack() as stack:
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(torch._dynamo.config.patch(fake_tensor_cache_enabled=False))
        stack.enter_context(_without_stack_traces())
        stack.enter_context(_without_memory_formats())
        stack.enter_context(size_arithmetic_kept())
        stack.enter_context(collection_paused())
        yield


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    before = getattr(torch.fx.config, "do_not_emit_stack_traces", False)  # older torch lacks it
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


@contextmanager
def _without_memory_formats() -> Iterator[None]:
    without = partial(_extract_tensor_metadata, include_contiguity=False)
    proxy_tensor._extract_tensor_metadata = without
    try:
        yield
    finally:
        proxy_tensor._extract_tensor_metadata = _extract_tensor_metadata
