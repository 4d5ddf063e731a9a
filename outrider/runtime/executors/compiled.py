"""A model's passes as compiled graphs: one for chains, one for trees, whatever their sizes.

The programs (``traced.py``) have symbolic sizes; linear layers and attention in them are our
kernels, which need no tuning per shape, so that a graph is made once and serves every draft length,
batch, context and KV buffer. Whatever does not compile, or compiles to something else
(``parity.py``), runs as it would have without, after one warning.

Legend: B rows, N columns of a pass, S slots.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.core.errors import OutriderWarning
from outrider.core.values import check_choice
from outrider.runtime.executors.compile_cache import Graph, compiled_program, first_line
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.traced import ChainPass, KVBuffers, TreePass, trace
from outrider.runtime.kernels.exact import use_exact_operators
from outrider.runtime.kv_cache.cache import KVCache

Compile = Literal["off", "auto", "max"]
MOST_TOKENS = 128
"""Tokens of a pass, over all rows, up to which the graph is used. Beyond it, as in a long prefill,
the arithmetic decides and not the overhead."""

Maker = Callable[[TreePass, Callable[[], ExportedProgram]], Graph]
"""Makes a graph of a pass and the program it has when it is traced."""

Span = Callable[[int, int], int]
"""How many slots a pass reads, of those that it must read and those that there are."""


def check_compile(value: str) -> None:
    """Raises InvalidParameterError unless the value is one that can be."""
    check_choice("compile", value, get_args(Compile))


class CompiledPass:
    """The graphs of a module, made when they are first needed; one pass at a time, since a graph
    has a place of its own for what it computes.

    Args:
        module: the model.
        windows: what each kind of layer sees; None for everything.
        limit: its longest context in tokens.
        name: how messages call it.
        make: makes a graph.
        read: how many slots a pass reads; by default those that it must.
        exact: whether a token's bits may not depend on how many tokens share its forward pass.

    Attributes:
        failed: whether a program did not compile, so that no other is tried.
        sealed: whether no more programs are made: what has none runs eagerly. Compiling takes
            many seconds, which a running request should not wait for.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        windows: Mapping[str, int | None],
        limit: int,
        name: str,
        make: Maker = compiled_program,
        read: Span = min,
        exact: bool = False,
    ) -> None:
        self.name = name
        self.failed = self.sealed = False
        self._trace = _exact_trace if exact else trace
        self._make, self._read = make, read
        self._of_model = module, windows, limit, module.dtype
        self._tree, self._chain = TreePass(*self._of_model), ChainPass(*self._of_model)
        self._drafts: dict[int, tuple[GreedyDraft, SampledDraft]] = {}
        self._graphs: dict[TreePass, Graph | None] = {}
        self._slot_S = torch.arange(0, device=module.device)
        self._lock = RLock()

    def chain(self, cache: KVCache, tokens_BN: Tensor) -> list[Tensor] | None:
        """Logits (B, N, V) of columns that follow one another and their sums (B,), or None if
        there is no graph: then the pass is still to do. The cache's KV buffers must have room for
        it."""
        inputs = tokens_BN, cache.length_B, self._slots(cache)
        return self._run(self._chain, cache, inputs)

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        depth: int,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> list[Tensor] | None:
        """A draft of ``depth`` (D) tokens behind these columns, drawn at these temperatures with
        these numbers in [0, 1), or greedy without: distributions or logits (B, D + 1, V), sums of
        all logits (B,), the chain from the root on (B, D + 1); None as :meth:`chain`. The KV
        buffers must have room for it."""
        with self._lock:
            if depth not in self._drafts:
                both = GreedyDraft(*self._of_model, depth), SampledDraft(*self._of_model, depth)
                self._drafts[depth] = both
        greedy, sampled = self._drafts[depth]
        inputs = [tokens_BN, cache.length_B, self._slots(cache)]
        if temperature_B is None or u_BD is None:
            return self._run(greedy, cache, inputs)
        return self._run(sampled, cache, [*inputs, temperature_B, u_BD])

    def tree(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: Sequence[Tensor],
    ) -> list[Tensor] | None:
        """The same for columns with places and masks, one (B, 1, N, S) per kind of layer."""
        span, rows = self._span(cache), cache.num_rows
        each = (_widened(mask, span).expand(rows, -1, -1, -1) for mask in masks)
        return self._run(self._tree, cache, (tokens_BN, positions_BN, slots_BN, *each))

    def _slots(self, cache: KVCache) -> Tensor:
        """A tensor of as many numbers as there are slots to read."""
        span, slot_S = self._span(cache), self._slot_S
        if slot_S.shape[0] < span:
            self._slot_S = slot_S = torch.arange(2 * span, device=cache.length_B.device)
        return slot_S[:span]

    def _span(self, cache: KVCache) -> int:
        return self._read(cache.span, cache.in_use()[0].shape[2])

    def _run(self, each: TreePass, cache: KVCache, inputs: Sequence[Tensor]) -> list[Tensor] | None:
        buffers = cache.in_use()
        with self._lock:
            if each not in self._graphs and not self.failed and not self.sealed:
                self._graphs[each] = self._made(each, buffers)
            graph = self._graphs.get(each)
            return None if graph is None else graph([*map(Tensor.contiguous, inputs), *buffers])

    def _made(self, each: TreePass, in_use: Sequence[Tensor]) -> Graph | None:
        half = len(in_use) // 2
        buffers = in_use[:half], in_use[half:]
        try:
            with torch.inference_mode(False):
                graph = self._make(each, lambda: self._trace(each, buffers))
        except Exception as error:  # the compiler's own exceptions are of many kinds
            self.failed = True
            _warn(f"{self.name} does not compile, so it runs eagerly: {first_line(error)}")
            return None
        try:
            difference = compare(each, graph, buffers)
        except Exception as error:
            difference = f"it fails when it is run: {first_line(error)}"
        if difference:
            _warn(f"{self.name}: the {each.kind} program compiled, but {difference}; runs eagerly")
            return None
        return graph


def _exact_trace(each: TreePass, buffers: KVBuffers) -> ExportedProgram:
    """The program of a pass with exact operators; a fused draft needs none, since what it proposes
    is verified."""
    program = trace(each, buffers)
    return program if isinstance(each, GreedyDraft) else use_exact_operators(program)


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)


def _widened(mask: Tensor, span: int) -> Tensor:
    """The mask over more slots, which it hides."""
    more = span - mask.shape[-1]
    hidden = torch.finfo(mask.dtype).min
    return functional.pad(mask, (0, more), value=hidden) if more else mask
