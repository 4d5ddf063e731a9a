"""A head bound to its target, as a model that the engine knows: its KV cache, its programs.

Legend: B rows, N tokens, D drafted tokens, H width of the head.
"""

import copy
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from outrider.core.clock import Stopwatch
from outrider.drafters.heads.fused_draft import HeadChainPlan, HeadExecutor
from outrider.drafters.heads.head import Head, N, NetworkHead
from outrider.drafters.heads.newest import NewestCache
from outrider.runtime import HFModel
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compile_cache import uses_kernels
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.hf.quantize import quantize_head
from outrider.runtime.kernels import use_kernels
from outrider.runtime.kernels.fused_layers import use_fused_layers
from outrider.runtime.kv_cache.buffer_pool import BufferPool
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan, KVLayout
from outrider.sampling.warp import DraftParameters

C = TypeVar("C", bound=NewestCache)


class HeadModel(HFModel):
    """The base class of heads that have a KV cache.

    Args:
        head: the weights.
        target: the model whose hidden states the head reads.
        module: a ``HeadProgram``.
        layers: configuration of the head's layers.
    """

    def __init__(self, head: Head, target: HFModel, module: nn.Module, layers: Any) -> None:
        self.module: Any = module
        self.tokenizer = target.tokenizer
        self.name = head.name
        self.limit = target.limit
        self.num_layers = layers.num_hidden_layers
        self.num_tokens = head.vocab_size
        self.device, self.dtype = target.device, target.dtype
        self.watch = Stopwatch(self.device)
        self.plan = KVCachePlan()
        self.spec = AttentionSpec({"full_attention": None}, self.limit, self.dtype)
        self.layout = _layout(layers, self.dtype, self.device)
        executor = target.compiled
        if executor is not None:  # the same kernels, and programs of the same compiler
            if uses_kernels(target.module):
                self.use_kernels()
            if self.device.type == "cuda":
                use_fused_layers(self.module, self.name)
                self.plan = KVCachePlan(pool=BufferPool())
            self.compiled = HeadExecutor(
                self.module,
                self.spec,
                self.name,
                executor.make,
                executor.read,
                check=executor.check,
            )

    def prepared(self, cache: C) -> C:
        """A new cache, with KV buffers where programs, which cannot allocate, need them."""
        context = cache.context
        cache.health = context.health
        if self.compiled is not None and self.layout is not None:
            cache.reserve(context.num_rows, max(context.lengths), self.layout)
        return cache

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        depth: int,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """A chain after the root by one compiled program: see :meth:`draft_by`."""
        found = self.draft_by(HeadChainPlan(depth), cache, tokens_BN, parameters, u_BD)
        if found is None:
            return None
        recorded, chain_BN = found
        return recorded, chain_BN

    def draft_by(
        self,
        plan: DraftPlan,
        cache: KVCache,
        tokens_BN: Tensor,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        """A chain or tree after the root by one compiled program, which first reads the newest
        tokens; None where there is none. Arguments and results as of ``runner.fused_draft``, but
        logits of greedy rows are over the draft vocabulary."""
        assert isinstance(cache, NewestCache)
        executor, newest = self.compiled, cache.newest
        if executor is None or not cache.is_plain:
            return None
        assert isinstance(executor, HeadExecutor)
        cache.reread()
        with self.watch:
            found = executor.draft_after(cache, newest, plan, parameters, u_BD)
        if found is None:
            return None
        recorded, health_B, *tokens, last_BH = found
        cache.have_read(last_BH)
        cache.health.add(self, health_B)
        return recorded, *tokens

    def use_kernels(self) -> None:
        """Lets the head use the kernels, as its target does.

        Raises:
            KernelError: they cannot be compiled here.
        """
        use_kernels(self.module, compact=True)


def drafting_copy(head: NetworkHead[N], target: HFModel) -> N:
    """A copy of a head's network where the target is, in the target's precision or in few bits.

    Raises:
        InvalidParameterError, MissingTorchaoError, UnsupportedModelError: of ``quantize_head``.
    """
    network = placed(head.network, target)
    if head.quantized is not None:
        quantize_head(network, head.quantized, head.vocabulary.size, head.name)
    return cast(N, network)


def placed(module: Any, target: HFModel) -> Any:
    """A copy of a module for inference where the target is and in its precision."""
    return copy.deepcopy(module).to(target.device, target.dtype).eval().requires_grad_(False)


def _layout(layers: Any, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """The shapes of the KV buffers of a head's layers."""
    width = layers.head_dim or layers.hidden_size // layers.num_attention_heads
    shape = layers.num_key_value_heads or layers.num_attention_heads, width, width
    return KVLayout((shape,) * layers.num_hidden_layers, dtype, device)
