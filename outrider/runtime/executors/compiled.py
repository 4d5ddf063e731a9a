"""The compiled executor: a model's forward passes and drafts as programs compiled ahead of time.

The programs (``traced.py``, ``fused_draft.py``) have symbolic sizes; linear layers and attention in
them are our kernels, which need no tuning per shape. So a program is compiled once and serves every
draft length, batch, context and KV buffer. What does not compile, or computes something else than
the model (``parity.py``), runs eagerly, after one warning.

Legend: B rows, N query tokens, K of them whose logits are asked for, D drafted tokens, S slots,
or tokens of the source, V vocabulary.
"""

import copy
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from threading import RLock
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional
from transformers import PreTrainedModel

from outrider.core.chain import cached_arange
from outrider.core.errors import OutriderWarning
from outrider.core.values import check_choice
from outrider.runtime.attention_metadata import AttentionSpec, Nodes
from outrider.runtime.executors.compile_cache import (
    Program,
    ProgramMissingError,
    compiled_program,
    first_line,
    only_loads,
)
from outrider.runtime.executors.eager import selects_logits
from outrider.runtime.executors.fused_draft import DraftPlan, GreedyDraft
from outrider.runtime.executors.layer_programs import CompiledLayers, LayerForward
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.traced import (
    AskedForward,
    ChainForward,
    NodesForward,
    TreeForward,
    trace,
)
from outrider.runtime.executors.traced_cache import KVBuffers, halves
from outrider.runtime.executors.traced_sources import SourcesForward
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.kernels.exact import use_exact_operators
from outrider.runtime.kv_cache.cache import KVCache
from outrider.sampling.warp import DraftParameters

Compile = Literal["off", "auto", "max"]
MOST_TOKENS = 512
"""Query tokens of a forward pass, over all rows, up to which the compiled program is used: those of
one row's prefill. Beyond it, as in prefills of several rows, arithmetic takes the time and not
Python."""

Compiler = Callable[[TreeForward | LayerForward, Callable[[], ExportedProgram]], Program]
"""Compiles a forward pass or a layer of one, given also the function that traces it."""


class Check(Protocol):
    """Compares a program with its forward pass, as ``parity.compare`` does."""

    def __call__(
        self, each: TreeForward, program: Program, buffers: KVBuffers, *, bits: bool
    ) -> str:
        """How the results of the two differ; "" where they agree."""


SpanRule = Callable[[int, int], int]
"""How many slots a forward pass reads, of those that it must read and those that there are."""


def check_compile(value: str) -> None:
    """Raises InvalidParameterError unless the value is one of ``Compile``."""
    check_choice("compile", value, get_args(Compile))


class CompiledExecutor:
    """An executor that runs chains and trees by compiled programs, each compiled when it is first
    needed. It runs one forward pass at a time, since a program has one buffer for what it computes.

    Hidden states are computed by programs of their own, one per set of layers.

    Args:
        module: the model.
        spec: what positions and masks depend on. Where the model has two sets of rotary factors
            (``spec.original``), chains run by the program of trees, which is told the positions.
        name: how messages call it.
        make: compiles a forward pass.
        read: how many slots a forward pass reads; by default those that it must.
        exact: whether a token's bits may not depend on how many tokens share its forward pass.
        recording: gives a view of the module that records the hidden states of some layers; None
            leaves batches that ask for hidden states to the eager executor.
        check: says how a program's results differ from those of its forward pass.

    Attributes:
        make, read, check: as given.
        selects_logits: whether its programs of chains compute the logits that a batch asks for,
            without those of the other query tokens. Not of an exact model, whose prompts are all
            read in one way, eagerly.
        failed: whether a program did not compile, so that no other is tried.
        sealed: whether no more programs are compiled: what has none runs eagerly. Compiling takes
            many seconds, which a running request should not wait for. Programs that another process
            compiles are loaded all the same, where a thread only loads (``when_missing``).
    """

    runs_forwards: ClassVar[bool] = True
    """Whether it has programs of forward passes, besides those of drafts."""

    def __init__(
        self,
        module: nn.Module,
        spec: AttentionSpec,
        name: str,
        make: Compiler = compiled_program,
        read: SpanRule = min,
        exact: bool = False,
        *,
        recording: Callable[[tuple[int, ...]], PreTrainedModel] | None = None,
        check: Check = compare,
    ) -> None:
        self.name = name
        self.failed = self.sealed = False
        self._module, self._spec = module, spec
        self._exact = exact
        self._trace = _exact_trace if exact else trace
        self.make, self.read, self.check = make, read, check
        self._recording = recording
        self.selects_logits = not exact and spec.original is None and selects_logits(module)
        self._chain = AskedForward if self.selects_logits else ChainForward
        self._tree = NodesForward if spec.original is None else TreeForward
        self._forwards: dict[tuple[int, ...], tuple[ChainForward, TreeForward]] = {
            (): (self._chain(module, spec), self._tree(module, spec))
        }
        self._sources = SourcesForward(module, spec) if spec.reads_sources else None
        self._drafts: dict[Hashable, tuple[GreedyDraft, GreedyDraft]] = {}
        self._programs: dict[TreeForward, Program | None] = {}
        self._layers: CompiledLayers | None = None
        self._by_layers: dict[TreeForward, Program] = {}
        self._slot_S = torch.arange(0, device=next(module.parameters()).device)
        self._slot_views: dict[int, Tensor] = {}  # spans recur from request to request
        self._lock = RLock()

    def of_copy(
        self, module: PreTrainedModel, recording: Callable[[tuple[int, ...]], PreTrainedModel]
    ) -> "CompiledExecutor":
        """The same executor for a copy of the module with weights of its own, and hence with
        programs of its own.

        Args:
            module: the copy.
            recording: as for this executor, of the copy.
        """
        twin = copy.copy(self)
        twin.failed = twin.sealed = False
        twin._module, twin._recording = module, recording
        twin._forwards = {(): (self._chain(module, self._spec), self._tree(module, self._spec))}
        twin._sources = SourcesForward(module, self._spec) if self._spec.reads_sources else None
        twin._drafts, twin._programs, twin._lock = {}, {}, RLock()
        twin._layers, twin._by_layers = None, {}
        return twin

    @property
    def has_programs(self) -> bool:
        """Whether there is a program to run."""
        return any(self._programs.values()) or self._layers is not None

    def has_chain(self, layers: tuple[int, ...]) -> bool:
        """Whether there is a program of forward passes over chains that return the hidden states of
        these layers, or none will be made."""
        forwards = self._forwards_for(layers)
        return self.failed or forwards is None or forwards[0] in self._programs

    def run_layers(self, buffers: Sequence[Tensor]) -> None:
        """Loads the programs of the model's decoder layers, or compiles them. Forward passes that
        have no program of their own then run by these. Where the layers cannot be compiled, or
        their programs compute something else, there is no warning: a program of the whole forward
        pass, which will be compiled next, has one.

        Args:
            buffers: KV buffers of a cache in use.
        """
        chain, kv = self._forwards[()][0], halves(buffers)
        tree = TreeForward(self._module, self._spec)
        with suppress(Exception), torch.inference_mode(False):  # the compiler's are of many kinds
            layers = CompiledLayers(tree, kv, self._compiled_layer)
            program = layers.program(chain, exact=self._exact)
            if not compare(chain, program, kv, bits=self._exact):
                self._layers, self._by_layers = layers, {chain: program}

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        """Runs a batch; None where there is no program for it, or where a layer has no KV buffer
        yet, which a program cannot allocate."""
        cache = batch.cache
        forwards = self._forwards_for(batch.hidden_layers)
        if forwards is None or not cache.make_room():
            return None
        chain, tree = forwards
        if batch.nodes is None and self._spec.original is None:
            found = self._run(chain, cache, self._asked_inputs(batch))
        elif batch.nodes is not None and self._spec.original is None:
            found = self._run(tree, cache, self._nodes_inputs(batch, batch.nodes))
        else:
            found = self._run(tree, cache, self._told_inputs(batch))
        if found is None:
            return None
        logits_BKV, health_B, *hidden = found
        return ForwardOutput(batch.asked(logits_BKV), health_B, hidden[0] if hidden else None)

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        plan: DraftPlan,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> list[Tensor] | None:
        """Drafts D tokens after the query tokens: a fused draft.

        Args:
            cache: its forward pass has begun, with room for all drafted tokens but the last.
            tokens_BN: the query tokens.
            plan: the chain or tree.
            parameters: of the rows' distributions; None for greedy ones.
            u_BD: numbers in [0, 1) to draw with; None for greedy rows.

        Returns:
            Distributions, or logits of greedy rows, (B, D + 1, V); the sum of the logits' health
            (B,); the tokens from the root on (B, D + 1). None as :meth:`forward`.
        """
        if self._spec.original is not None or not cache.make_room():
            return None
        programs = self._drafts.get(plan)
        if programs is None:
            with self._lock:
                programs = self._drafts.setdefault(plan, plan.programs(self._module, self._spec))
        greedy, sampled = programs
        inputs = [tokens_BN, cache.length_B, self._slots(cache)]
        if parameters is None or u_BD is None:
            return self._run(greedy, cache, lambda: inputs)
        return self._run(sampled, cache, lambda: [*inputs, *parameters, u_BD])

    def read_sources(self, cache: KVCache, tokens_BS: Tensor) -> bool:
        """Encodes the sources of a batch, and writes the keys and values of cross-attention over
        them; returns whether there is a program for it.

        Args:
            cache: of an encoder-decoder. Its KV buffers are there, those of the decoder's own
                tokens included.
            tokens_BS: the sources, as wide as the cache's mask of them.
        """
        if self._sources is None:
            return False
        return self._run(self._sources, cache, lambda: [tokens_BS]) is not None

    def _forwards_for(self, layers: tuple[int, ...]) -> tuple[ChainForward, TreeForward] | None:
        """The forward passes, of chains and of trees, that return the hidden states of these
        layers."""
        found = self._forwards.get(layers)
        if found is None and self._recording is not None:
            with self._lock:
                arguments = self._recording(layers), self._spec, layers
                passes = self._chain(*arguments), self._tree(*arguments)
                found = self._forwards.setdefault(layers, passes)
        return found

    def _chain_inputs(self, batch: ForwardBatch) -> Callable[[], Sequence[Tensor]]:
        cache = batch.cache
        return lambda: (batch.tokens_BN, cache.length_B, self._slots(cache))

    def _asked_inputs(self, batch: ForwardBatch) -> Callable[[], Sequence[Tensor]]:
        inputs = self._chain_inputs(batch)
        if not self.selects_logits:
            return inputs
        num_queries = batch.tokens_BN.shape[1]
        first = max(0, num_queries - batch.num_logits) if batch.num_logits else 0
        index_N = cached_arange(num_queries, batch.tokens_BN.device)
        asked_K = index_N[first:] if first else index_N  # a view takes longer than the question
        return lambda: (*inputs(), asked_K)

    def _nodes_inputs(self, batch: ForwardBatch, nodes: Nodes) -> Callable[[], Sequence[Tensor]]:
        inputs = self._chain_inputs(batch)
        return lambda: (*inputs(), nodes.ancestors_BNM, nodes.depth_BM)

    def _told_inputs(self, batch: ForwardBatch) -> Callable[[], Sequence[Tensor]]:
        def inputs() -> Sequence[Tensor]:
            metadata = self._spec.metadata_of(batch.cache, batch.tokens_BN.shape[1], batch.nodes)
            span, rows = self._span(batch.cache), batch.cache.num_rows
            inputs = [batch.tokens_BN, metadata.positions_BN, metadata.slots_BN]
            for mask in metadata.masks.values():
                inputs.append(_widened(mask, span).expand(rows, -1, -1, -1))
            if metadata.slot_BS is not None:
                more = span - metadata.slot_BS.shape[1]  # which the masks hide
                inputs.append(functional.pad(metadata.slot_BS, (0, more)).expand(rows, -1))
            return inputs

        return inputs

    def _slots(self, cache: KVCache) -> Tensor:
        """A tensor of as many numbers as there are slots to read."""
        span = self._span(cache)
        found = self._slot_views.get(span)
        if found is None:
            if self._slot_S.shape[0] < span:
                self._slot_S = torch.arange(2 * span, device=cache.length_B.device)
                self._slot_views.clear()
            found = self._slot_views[span] = self._slot_S[:span]
        return found

    def _span(self, cache: KVCache) -> int:
        return self.read(cache.span, cache.in_use()[0].shape[2])

    @property
    def refused(self) -> list[str]:
        """The kinds of programs that did not compile, or compute something else than the model."""
        return [each.kind for each, program in self._programs.items() if program is None]

    def _run(
        self, each: TreeForward, cache: KVCache, inputs: Callable[[], Sequence[Tensor]]
    ) -> list[Tensor] | None:
        """The results of a program; None where there is none. Inputs are computed only if there
        is."""
        buffers = self._buffers(cache)
        with self._lock:
            program = self._programs.get(each) or self._found(each, buffers)
            program = program or self._found_by_layers(each)
            if program is None:
                return None
            return program([*map(Tensor.contiguous, inputs()), *buffers])

    def _found(self, each: TreeForward, buffers: Sequence[Tensor]) -> Program | None:
        """The program, which is loaded or compiled unless that was tried before."""
        may_look = not self.sealed or only_loads()
        if each not in self._programs and not self.failed and may_look:
            with suppress(ProgramMissingError):
                self._programs[each] = self._compiled(each, buffers)
        return self._programs.get(each)

    def _found_by_layers(self, each: TreeForward) -> Program | None:
        """A forward pass by the programs of its layers, if there are any."""
        if self._layers is None or type(each) not in (self._chain, self._tree):
            return None
        if each not in self._by_layers:
            self._by_layers[each] = self._layers.program(each, exact=self._exact)
        return self._by_layers[each]

    def _compiled_layer(self, each: LayerForward, key: Tensor, value: Tensor) -> Program:
        def trace() -> ExportedProgram:
            program = each.trace(key, value)
            return use_exact_operators(program) if self._exact else program

        return self.make(each, trace)

    def _buffers(self, cache: KVCache) -> Sequence[Tensor]:
        """The KV buffers that programs read and write, keys and then values."""
        return cache.in_use()

    def _compiled(self, each: TreeForward, in_use: Sequence[Tensor]) -> Program | None:
        buffers = halves(in_use)
        try:
            with torch.inference_mode(False):
                program = self.make(each, lambda: self._trace(each, buffers))
        except ProgramMissingError:
            raise
        except Exception as error:  # the compiler's own exceptions are of many kinds
            self.failed = True
            _warn(f"{self.name} does not compile, so it runs eagerly: {first_line(error)}")
            return None
        try:
            bits = self._exact and not isinstance(each, GreedyDraft)
            difference = self.check(each, program, buffers, bits=bits)
        except Exception as error:
            difference = f"it fails when it is run: {first_line(error)}"
        if difference:
            _warn(f"{self.name}: the {each.kind} program compiled, but {difference}; runs eagerly")
            return None
        return program


def _exact_trace(each: TreeForward, buffers: KVBuffers) -> ExportedProgram:
    """The program of a forward pass with exact operators. A fused draft needs none, since the
    target verifies what it proposes."""
    program = trace(each, buffers)
    return program if isinstance(each, GreedyDraft) else use_exact_operators(program)


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=2)


def _widened(mask: Tensor, span: int) -> Tensor:
    """A mask over more slots, all of which it hides."""
    more = span - mask.shape[-1]
    hidden = torch.finfo(mask.dtype).min
    return functional.pad(mask, (0, more), value=hidden) if more else mask
