"""How many processes that compile an engine's programs fit into memory.

Each of them loads the models once more. A machine that runs out of memory ends one of its
processes, which may be the engine's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.engine.compiler_process import OVERHEAD
from outrider.engine.engine import Engine
from outrider.runtime import HFModel
from outrider.runtime.kernels import NarrowLinear
from outrider.runtime.kv_cache.storage import free_bytes


class CompilerMemory(NamedTuple):
    """The memory of processes that compile.

    Attributes:
        needed: bytes that each of them takes, about.
        free: bytes that all of them may take.
    """

    needed: int
    free: int

    @property
    def num_processes(self) -> int:
        """How many fit."""
        return max(0, self.free) // self.needed


def compiler_memory(engine: Engine) -> CompilerMemory:
    """The memory of processes that compile an engine's programs. What KV buffers may still take,
    where ``max_memory`` says it, is left to them."""
    models = dict.fromkeys((engine.target, *engine.drafter.capabilities.models))
    held, most = engine.kv_bytes or (0, 0)
    return CompilerMemory(
        OVERHEAD + sum(map(_loaded_bytes, models)),
        free_bytes(torch.device("cpu")) - (most - held),
    )


def _loaded_bytes(model: HFModel) -> int:
    """Bytes of a model's weights as they are read, before they are rounded to a few bits."""
    tensors = {id(each): each.nbytes for each in model.module.parameters()}
    for layer in model.module.modules():
        if isinstance(layer, NarrowLinear):
            read = layer.in_features * layer.out_features * model.dtype.itemsize
            tensors[id(layer.weight)] = max(read, tensors[id(layer.weight)])
    return sum(tensors.values())
