"""An EAGLE-3 head as a model that drafters run: its weights, its cache, its forward passes.

    slot t of the cache holds (feature of x_t, embedding of x_t+1); its output predicts x_t+2

What a drafter does not hand over is the feature of each node's parent, which the cache remembers.
``eagle3_network.py`` has the network, ``eagle3.py`` the drafters.

Legend: B rows, N tokens, M nodes drafted in this round, H width of the head, F width of the target
times the layers read, V vocabulary of the target.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.core import (
    Context,
    Lengths,
    ReadHidden,
)
from outrider.core.clock import Stopwatch
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_network import Eagle3Config, Eagle3Network
from outrider.drafters.heads.fused_draft import HeadExecutor, HeadModule
from outrider.drafters.heads.head import check_target
from outrider.drafters.heads.unread import Unread, at_last
from outrider.runtime import HFModel, KVCache, Nodes
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compile_cache import uses_kernels
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.kernels import use_kernels
from outrider.runtime.kv_cache.storage import KVCachePlan, KVLayout
from outrider.runtime.prefill import unsampled_context


class Eagle3Head:
    """The weights of a head, which belong to one target.

    Args:
        network: the weights.
        vocabulary: the tokens that it drafts.
        name: how messages call it.
        embedding: embeddings of its own, (V, H); None where it uses the target's.
    """

    kind = "eagle3"

    def __init__(
        self,
        network: Eagle3Network,
        vocabulary: DraftVocabulary,
        name: str = "head",
        embedding: nn.Embedding | None = None,
    ) -> None:
        self.network = network
        self.vocabulary = vocabulary
        self.name = name
        self.embedding = embedding

    @property
    def config(self) -> Eagle3Config:
        return self.network.config

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.num_tokens

    @property
    def hidden_size(self) -> int:
        return self.config.target_hidden_size

    @property
    def target_layers(self) -> tuple[int, ...]:
        return self.config.target_layers


class FeatureCache(KVCache):
    """The head's keys and values, and the features that the next tokens are read with.

    Attributes:
        last_BH: the head's output for each row's root; arbitrary where no slot is committed.
        drafted_BMH: its outputs for the nodes drafted since.
        base: slots of each row that hold committed tokens ahead of the newest.
        newest: the newest tokens, whose slots follow once they are read.
        is_read: whether they are read.
    """

    def __init__(self, model: "Eagle3Model", context: Context) -> None:
        super().__init__(context, model.num_layers, model.limit + MARGIN, model.plan)
        self.last_BH = torch.zeros(
            context.num_rows, model.width, dtype=model.dtype, device=model.device
        )
        self.drafted_BMH = self.last_BH[:, None][:, :0]
        self.base = self.sequence_lengths
        width = model.head.config.fused_size
        self.newest = Unread.nothing(context.root_B, width, model.dtype)
        self.is_read = False

    @property
    def known(self) -> Lengths:
        """How many tokens of each row the head has been told of."""
        return self.base + self.newest.num

    def forget_draft(self) -> None:
        """Forgets the slots and features of drafted tokens."""
        self.rollback(self.known if self.is_read else self.base)
        self.drafted_BMH = self.drafted_BMH[:, :0]

    def have_read(self, last_BH: Tensor) -> None:
        """The newest tokens are read; ``last_BH`` is the output for their last ones, the roots."""
        self.append(self.newest.num)
        self.last_BH, self.is_read = last_BH, True

    def renew(self, newest: Unread) -> None:
        """These tokens follow those that are read."""
        assert self.is_read
        self.base = self.known
        self.newest, self.is_read = newest, False

    def reread(self) -> None:
        """The newest tokens are to be read again."""
        self.rollback(self.base)
        self.is_read = False

    def parents(self, nodes: Nodes | None) -> Tensor:
        """The features of the parents of the query tokens, (B, N, H); of a chain's next token
        without ``nodes``."""
        known_BMH = torch.cat([self.last_BH[:, None], self.drafted_BMH], 1)
        if nodes is None:
            return known_BMH[:, -1:]
        B, N, M = nodes.ancestors_BNM.shape
        number_M = torch.arange(1, M + 1, device=known_BMH.device)
        above_BNM = nodes.ancestors_BNM & (number_M <= nodes.first + number_M[:N, None] - 1)
        parent_BN = (above_BNM * number_M).amax(2)  # 0, the root, where it has no node above
        return known_BMH.gather(1, parent_BN[..., None].expand(B, N, known_BMH.shape[2]))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        index_B = torch.tensor(rows, dtype=torch.int64, device=self.last_BH.device)
        self.last_BH = self.last_BH[index_B]
        self.drafted_BMH = self.drafted_BMH[index_B]
        self.base = self.base.keep(rows)
        self.newest = self.newest.keep(rows)

    def join(self, other: KVCache) -> None:
        assert isinstance(other, FeatureCache)
        self.reread()
        other.reread()
        super().join(other)
        self.last_BH = torch.cat([self.last_BH, other.last_BH])
        self.drafted_BMH = self.last_BH[:, None][:, :0]
        self.base = self.base.join(other.base)
        self.newest = self.newest.join(other.newest)


class Eagle3Model(HFModel):
    """A head bound to its target, as the model that drafters run: tokens in, logits out.

    Args:
        head: the weights.
        target: the model whose hidden states it reads, whose embeddings it may share, and whose
            context length it has: a rotary embedding has no longest position.

    Raises:
        IncompatibleError: a head of another target.
    """

    def __init__(self, head: Eagle3Head, target: HFModel) -> None:
        check_target(head, target)
        self.head = head
        self.network: Eagle3Network = _placed(head.network, target)
        embedding: nn.Module = target.module.get_input_embeddings()
        if head.embedding is not None:
            embedding = _placed(head.embedding, target)
        vocabulary = head.vocabulary.to(target.device)
        self.module: Any = HeadModule(self.network, embedding, vocabulary)
        self.tokenizer = target.tokenizer
        self.name = head.name
        self.limit = target.limit
        self.num_layers = head.config.layer.num_hidden_layers
        self.num_tokens = head.vocab_size
        self.width: int = head.config.layer.hidden_size
        self.device, self.dtype = target.device, target.dtype
        self.watch = Stopwatch(self.device)
        self.plan = KVCachePlan()
        self.spec = AttentionSpec({"full_attention": None}, self.limit, self.dtype)
        self.layout = _layout(head.config.layer, self.dtype, self.device)
        if target.compiled is not None:
            self._compile(target, target.compiled)

    def start(self, context: Context, read: ReadHidden | None = None) -> FeatureCache:
        """An empty cache; :meth:`read` fills it. A head has no hidden states for others."""
        cache = FeatureCache(self, context)
        cache.health = context.health
        if self.compiled is not None and self.layout is not None:  # a program cannot allocate
            cache.reserve(context.num_rows, max(context.lengths), self.layout)
        return cache

    def catch_up(self, cache: FeatureCache) -> None:
        """Reads the newest tokens, unless they are read."""
        if cache.is_read:
            return
        tokens_BK, hidden_BKF, num = cache.newest
        cache.have_read(at_last(self.read(cache, tokens_BK, hidden_BKF), num.device_B)[:, 0])

    def read(self, cache: FeatureCache, tokens_BN: Tensor, hidden_BNF: Tensor) -> Tensor:
        """Reads tokens after the committed slots, each with the target's hidden states at the
        token before it; returns the head's outputs, (B, N, H), and commits nothing."""
        batch = ForwardBatch(cache, tokens_BN)
        batch.begin()
        with self.watch:
            return self._run(batch, self.network.fuse(hidden_BNF.to(self.dtype)))

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """One pass over drafted tokens, whose features are the head's own."""
        cache = batch.cache
        assert isinstance(cache, FeatureCache)
        batch.begin()
        with self.watch:
            output_BNH = self._run(batch, cache.parents(batch.nodes))
            cache.drafted_BMH = torch.cat([cache.drafted_BMH, output_BNH], 1)
            return self.logits(output_BNH, cache)

    def logits(self, output_BNH: Tensor, cache: KVCache) -> ForwardOutput:
        """Logits over the target's vocabulary; notes their health in the cache."""
        logits_BNV, health_B = self.module.logits(output_BNH)
        cache.health.add(self, health_B)
        return ForwardOutput(logits_BNV, health_B)

    def draft(
        self,
        cache: KVCache,
        tokens_BN: Tensor,
        depth: int,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """A draft after the root by one compiled program, which first reads the newest tokens;
        None where there is none. Arguments and results as of
        ``runner.fused_draft``, but logits of greedy rows are over the draft vocabulary."""
        assert isinstance(cache, FeatureCache)
        executor, newest = self.compiled, cache.newest
        if executor is None or not cache.is_plain or depth < 2:
            return None
        assert isinstance(executor, HeadExecutor)
        cache.reread()
        cache.begin(newest.tokens_BK.shape[1] + depth - 1)
        with self.watch:
            found = executor.draft_behind(cache, newest, depth, temperature_B, u_BD)
        if found is None:
            return None
        recorded, health_B, chain_BN, last_BH = found
        cache.have_read(last_BH)
        cache.health.add(self, health_B)
        return recorded, chain_BN

    @torch.inference_mode()
    def example_cache(self) -> KVCache:
        """A cache with one token, outside every memory budget."""
        twin = copy.copy(self)
        twin.plan, twin.watch = KVCachePlan(self.plan.kv_dtype), Stopwatch(self.device)
        cache = twin.start(unsampled_context(self, [0, 0]))
        fused = self.head.config.fused_size
        nothing_BNF = torch.zeros(1, 1, fused, dtype=self.dtype, device=self.device)
        twin.read(cache, cache.context.tokens_BT[:, :1], nothing_BNF)
        cache.append(1)
        return cache

    def _run(self, batch: ForwardBatch, feature_BNH: Tensor) -> Tensor:
        metadata = self.spec.metadata_of(batch.cache, batch.tokens_BN.shape[1], batch.nodes)
        mask = metadata.mask
        assert isinstance(mask, Tensor)
        output_BNH: Tensor = self.module(
            batch.tokens_BN, feature_BNH, metadata.positions_BN, mask, batch.cache
        )
        return output_BNH

    def _compile(self, target: HFModel, executor: CompiledExecutor) -> None:
        """Lets the head run as its target does: by the same kernels, and by programs of the same
        compiler."""
        if uses_kernels(target.module):
            use_kernels(self.module, compact=True)
        make, read = executor.make, executor.read
        self.compiled = HeadExecutor(self.module, self.spec, self.name, make, read)


def _layout(layer: LlamaConfig, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """The shapes of the head's KV buffers."""
    width = layer.head_dim or layer.hidden_size // layer.num_attention_heads
    shape = layer.num_key_value_heads or layer.num_attention_heads, width, width
    return KVLayout((shape,) * layer.num_hidden_layers, dtype, device)


def _placed(module: nn.Module, target: HFModel) -> Any:
    """A copy of a module for inference where the target is and in its precision."""
    return copy.deepcopy(module).to(target.device, target.dtype).eval().requires_grad_(False)
