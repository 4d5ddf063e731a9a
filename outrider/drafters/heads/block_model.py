"""A block head bound to its target: its passes, eagerly and as parts of a program.

``block_network.py`` has the network, ``block.py`` the drafter.

Legend: B rows, K tokens to read, N slots of the block, S slots of the cache, H width of the head,
F width of the target's hidden states side by side, D draft vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from outrider.core import Context, ReadHidden, cached_arange
from outrider.core.chain import Step
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.block_network import BlockNetwork, Remember
from outrider.drafters.heads.draft_vocabulary import DraftingModule, DraftVocabulary
from outrider.drafters.heads.fused_draft import Slots
from outrider.drafters.heads.head_model import HeadModel, drafting_copy
from outrider.drafters.heads.newest import NewestCache, at_last
from outrider.drafters.heads.slots import Slots as PredictedSlots
from outrider.runtime import HFModel, KVCache
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.traced_cache import TracedKVCache
from outrider.runtime.hf.adapter import MARGIN
from outrider.runtime.hf.sharded import embeddings_of
from outrider.runtime.kernels import use_kernels
from outrider.runtime.kv_cache.storage import query_slots
from outrider.runtime.prefill import unsampled_context


class BlockOutput(NamedTuple):
    """What the drafting pass computed of the slots that predict a token.

    Attributes:
        h_BNH: the network's outputs.
        logits_BND: their logits, without the correction by the token before.
    """

    h_BNH: Tensor
    logits_BND: Tensor


class BlockModule(DraftingModule):
    """A block head with embeddings, output layer and vocabulary: a ``HeadProgram``.

    Args:
        network: the weights.
        target: the model whose embeddings and, where the head has none, output layer it takes.
        vocabulary: the tokens that the head drafts.
    """

    def __init__(self, network: BlockNetwork, target: HFModel, vocabulary: DraftVocabulary) -> None:
        super().__init__(vocabulary)
        self.network = network
        self.embedding = target.module.get_input_embeddings()
        self.targets_output = (
            None if network.lm_head is not None else target.module.get_output_embeddings()
        )

    def extra_repr(self) -> str:
        """All that a program of it depends on besides its parts (``compile_cache.py``)."""
        config = self.network.config
        block = config.block_size, config.first_slot, config.mask_token_id
        return f"{block}, {config.confidence_reads_markov}, {self.num_tokens}"

    @property
    def config(self) -> Qwen3Config:
        """The layers'."""
        return self.network.config.layers

    @property
    def fused_size(self) -> int:
        """F."""
        return self.network.fc.in_features

    def num_drafting(self, depth: int) -> int:
        """Slots of a block, however many of them draft."""
        return self.network.config.block_size

    def remember(self, hidden_BNF: Tensor, position_BN: Tensor, cache: Any) -> None:
        """Caches the keys and values of more of the context."""
        context_BNH = self.network.context(hidden_BNF)
        by_layer = self.network.context_keys_values(context_BNH, position_BN)
        for number, (key_BANC, value_BANC) in enumerate(by_layer):
            cache.update(key_BANC, value_BANC, number)

    def block(
        self, root_B1: Tensor, position_BN: Tensor, remember: Remember, mask_B11S: Tensor | None
    ) -> BlockOutput:
        """The drafting pass.

        Args:
            root_B1: the root of each row.
            position_BN: positions of the block's slots.
            remember, mask_B11S: as of ``BlockNetwork``.
        """
        config = self.network.config
        masks_BM = torch.full_like(root_B1, config.mask_token_id).expand(-1, config.block_size - 1)
        noise_BNH = embeddings_of(self.embedding, torch.cat([root_B1, masks_BM], 1))
        h_BNH = self.network(noise_BNH, position_BN, remember, mask_B11S)[:, config.first_slot :]
        output = self.network.lm_head if self.targets_output is None else self.targets_output
        assert output is not None
        return BlockOutput(h_BNH, output(h_BNH))

    def logits(self, output: BlockOutput, slot: int, before_Bn: Tensor) -> Tensor:
        """Logits of a slot after each of some tokens, (B, n, D); (B, 1, D) where they do not
        depend on these tokens."""
        logits_B1D = output.logits_BND[:, slot, None]
        correction_BnD = self.network.correction(before_Bn)
        return logits_B1D if correction_BnD is None else logits_B1D + correction_BnD

    def fill(self, spec: AttentionSpec, tokens_BS: Tensor, hidden_BSF: Tensor, to: Slots) -> None:
        """See ``HeadProgram``."""
        self._remember_in(hidden_BSF, to)

    def begin_draft(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Step, Tensor]:
        """See ``HeadProgram``: one pass over the newest tokens, and one over the block."""
        self._remember_in(hidden_BKF, slots)
        length_B, N = slots.length_B + num_B, self.network.config.block_size
        position_BN = query_slots(length_B, 0, N)
        slot_S = torch.arange(slots.span, device=length_B.device)
        mask_B11S = (slot_S < (length_B + N)[:, None])[:, None, None]
        cache = TracedKVCache(slots.keys, slots.values, position_BN, slots.span)
        root_B1 = at_last(tokens_BK[..., None], num_B)[..., 0]
        output = self.block(root_B1, position_BN, cache.update, mask_B11S)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            return self.logits(output, len(tokens) - 1, tokens[-1][:, None])

        return step, output.h_BNH[:, 0]

    def _remember_in(self, hidden_BNF: Tensor, slots: Slots) -> None:
        position_BN = query_slots(slots.length_B, 0, hidden_BNF.shape[1])
        cache = TracedKVCache(slots.keys, slots.values, position_BN, slots.span)
        self.remember(hidden_BNF, position_BN, cache)


class BlockModel(HeadModel):
    """A block head bound to its target.

    Args:
        head: the weights, of which a copy is cast to the target's precision.
        target: the model that it was trained for.

    Raises:
        IncompatibleError: a head of another target; the message names both numbers.

    Attributes:
        least_known: tokens that a row's cache must hold before it drafts.
    """

    least_known: ClassVar[int] = 0

    def __init__(self, head: BlockHead, target: HFModel) -> None:
        head.check(target)
        self.head = head
        self.network: BlockNetwork = drafting_copy(head, target)
        module = BlockModule(self.network, target, head.vocabulary.to(target.device))
        super().__init__(head, target, module, head.config.layers)

    def start(self, context: Context, read: ReadHidden | None = None) -> NewestCache:
        """An empty cache; :meth:`read` fills it. A head has no hidden states for others."""
        limit, width = self.limit + MARGIN, self.module.fused_size
        return self.prepared(
            NewestCache(context, self.num_layers, limit, self.plan, width, self.dtype)
        )

    def read(self, cache: KVCache, hidden_BNF: Tensor) -> None:
        """Caches the keys and values of more of the context, and commits nothing."""
        cache.begin(hidden_BNF.shape[1])
        position_BN = query_slots(cache.length_B, 0, hidden_BNF.shape[1])
        with self.watch:
            self.module.remember(hidden_BNF.to(self.dtype), position_BN, cache)

    def read_prompt(
        self, cache: NewestCache, context: Context, hidden_BNF: Tensor, first: int
    ) -> None:
        """Adds the hidden states of a pass of the prefill; those beyond a row's last token but one
        are dropped when the row drafts."""
        self.read(cache, hidden_BNF)
        cache.append(hidden_BNF.shape[1])
        cache.base = cache.sequence_lengths.at_most(context.sequence_lengths - 1)

    def catch_up(self, cache: NewestCache) -> None:
        """Reads the newest tokens, unless they are read."""
        if cache.is_read:
            return
        hidden_BKF = cache.newest.hidden_BKF
        self.read(cache, hidden_BKF)
        cache.have_read(hidden_BKF[:, 0])

    def run(self, cache: NewestCache, context: Context) -> BlockOutput:
        """The drafting pass after the committed tokens."""
        self.catch_up(cache)
        N = self.network.config.block_size
        cache.begin(N)
        position_BN = query_slots(cache.length_B, 0, N)
        mask_B11S = None
        if not cache.is_uniform:
            slot_S = cached_arange(cache.span, context.device)
            mask_B11S = (slot_S < (cache.length_B + N)[:, None])[:, None, None]
        with self.watch:
            output: BlockOutput = self.module.block(
                context.root_B[:, None], position_BN, cache.update, mask_B11S
            )
        return output

    def predict(self, cache: NewestCache, context: Context, max_tokens: int) -> PredictedSlots:
        """What the drafting pass predicts, slot by slot, of at most so many slots."""
        output, network = self.run(cache, context), self.network

        def confidence(slot: int, before_B: Tensor) -> Tensor:
            return network.confidence_logits(output.h_BNH[:, slot], before_B).float().sigmoid()

        return PredictedSlots(
            min(output.h_BNH.shape[1], max_tokens),
            partial(self.module.logits, output),
            self.module.vocabulary if network.config.has_own_output else None,
            confidence if network.config.has_confidence else None,
        )

    @torch.inference_mode()
    def example_cache(self) -> KVCache:
        """A cache with one token, outside every memory budget."""
        context = unsampled_context(self, [0, 0])
        width, dtype = self.module.fused_size, self.dtype
        plan = type(self.plan)(self.plan.kv_dtype)
        cache = NewestCache(context, self.num_layers, self.limit + MARGIN, plan, width, dtype)
        self.read(cache, torch.zeros(1, 1, width, dtype=dtype, device=self.device))
        cache.append(1)
        return cache

    def use_kernels(self) -> None:
        use_kernels(nn.ModuleList(self.network.children()), compact=True)
