"""An EAGLE-3 head as a model that drafters run: its weights, its cache, its forward passes.

    slot t of the cache holds (feature of x_t, embedding of x_t+1); its output predicts x_t+2

What a drafter does not hand over is the feature of each node's parent, which the cache remembers.
``eagle3_network.py`` has the network, ``eagle3.py`` the drafters.

Legend: B rows, N tokens, M nodes drafted in this round, H width of the head, F width of the target
times the layers read, V vocabulary of the target.
"""

import copy
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.core import Context, Lengths, ReadHidden
from outrider.core.clock import Stopwatch
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_module import HeadModule
from outrider.drafters.heads.eagle3_network import Eagle3Config, Eagle3Network
from outrider.drafters.heads.head import NetworkHead, check_target
from outrider.drafters.heads.head_model import HeadModel, drafting_copy, placed
from outrider.drafters.heads.newest import Newest, NewestCache, at_last
from outrider.runtime import HFModel, KVCache, Nodes
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.kv_cache.storage import KVCachePlan
from outrider.runtime.prefill import unsampled_context


class Eagle3Head(NetworkHead[Eagle3Network]):
    """The weights of a head, which belong to one target.

    Args:
        network, vocabulary, name: as of ``NetworkHead``.
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
        super().__init__(network, vocabulary, name)
        self.embedding = embedding

    @property
    def config(self) -> Eagle3Config:
        return self.network.config


class FeatureCache(NewestCache):
    """The head's keys and values, and the features that the next tokens are read with.

    Attributes:
        last_BH: the head's output for each row's root, once the newest tokens are read.
        drafted_BMH: its outputs for the nodes drafted since.
    """

    def __init__(self, model: "Eagle3Model", context: Context) -> None:
        width, limit = model.head.config.fused_size, model.limit + MARGIN
        super().__init__(context, model.num_layers, limit, model.plan, width, model.dtype)
        self.last_BH = torch.zeros(
            context.num_rows, model.width, dtype=model.dtype, device=model.device
        )
        self.drafted_BMH = self.last_BH[:, None][:, :0]

    def forget_draft(self) -> None:
        super().forget_draft()
        self.drafted_BMH = self.drafted_BMH[:, :0]

    def have_read(self, last_BH: Tensor) -> None:
        super().have_read(last_BH)
        self.last_BH = last_BH

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

    def join(self, other: KVCache) -> None:
        super().join(other)
        assert isinstance(other, FeatureCache)
        self.last_BH = torch.cat([self.last_BH, other.last_BH])
        self.drafted_BMH = self.last_BH[:, None][:, :0]


class Eagle3Model(HeadModel):
    """A head bound to its target, as the model that drafters run: tokens in, logits out.

    Args:
        head: the weights.
        target: the model whose hidden states it reads, whose embeddings it may share, and whose
            context length it has: a rotary embedding has no longest position.

    Raises:
        IncompatibleError: a head of another target.
    """

    module_type: ClassVar[type[HeadModule]] = HeadModule

    def __init__(self, head: Eagle3Head, target: HFModel) -> None:
        check_target(head, target)
        self.head = head
        self.network: Eagle3Network = drafting_copy(head, target)
        embedding: nn.Module = target.module.get_input_embeddings()
        if head.embedding is not None:
            embedding = placed(head.embedding, target)
        vocabulary = head.vocabulary.to(target.device)
        self.width: int = head.config.layer.hidden_size
        module = self.module_type(self.network, embedding, vocabulary)
        super().__init__(head, target, module, head.config.layer)

    def start(self, context: Context, read: ReadHidden | None = None) -> FeatureCache:
        """An empty cache; :meth:`read` fills it. A head has no hidden states for others."""
        return self.prepared(FeatureCache(self, context))

    def read_prompt(
        self, cache: NewestCache, context: Context, hidden_BNF: Tensor, first: int
    ) -> None:
        """Reads the next tokens of the prompts with the target's hidden states before them.

        Args:
            cache: mutated.
            context: the prompts.
            hidden_BNF: the target's hidden states at tokens ``first``, ``first + 1``, … of each
                row; arbitrary where a row's root follows.
            first: as many tokens as were handed over before.
        """
        N = hidden_BNF.shape[1]
        tokens_BN = context.tokens_BT[:, first + 1 : first + 1 + N]
        self.read(cache, tokens_BN, hidden_BNF)
        cache.append(N)
        cache.newest = _roots(cache.newest, context, hidden_BNF, first)
        cache.base = cache.sequence_lengths.at_most(context.sequence_lengths - 1)
        cache.base = cache.base - cache.newest.num

    def catch_up(self, cache: NewestCache) -> None:
        """Reads the newest tokens, unless they are read."""
        if cache.is_read:
            return
        tokens_BK, hidden_BKF, num = cache.newest
        cache.have_read(at_last(self.read(cache, tokens_BK, hidden_BKF), num.device_B)[:, 0])

    def read(self, cache: NewestCache, tokens_BN: Tensor, hidden_BNF: Tensor) -> Tensor:
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


def _roots(before: Newest, context: Context, hidden_BNF: Tensor, first: int) -> Newest:
    """The roots of the rows whose prompts end with these hidden states, to be read again: a draft
    begins with the pass over them.

    Args:
        before: the roots of the rows whose prompts ended before.
        context: the prompts.
        hidden_BNF: the target's hidden states at tokens ``first``, ``first + 1``, … of each row.
        first: as above.
    """
    N = hidden_BNF.shape[1]
    last_B = context.length_B - 2 - first
    hidden_B1F = at_last(hidden_BNF.to(before.hidden_BKF.dtype), last_B.clamp(max=N - 1) + 1)
    ends_here_B11 = ((last_B >= 0) & (last_B < N))[:, None, None]
    num = [int(0 <= n - 2 < first + N) for n in context.lengths]
    return Newest(
        before.tokens_BK,
        torch.where(ends_here_B11, hidden_B1F, before.hidden_BKF),
        Lengths.of(num, context.device),
    )
