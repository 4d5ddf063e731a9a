"""A draft of an EAGLE-3 head as one program: no Python between its tokens.

The first pass of the head reads the tokens that the last round emitted, with the target's hidden
states, and the first token follows from its output; each other token takes one pass of the head
over the token before it. Tokens are drawn within the draft vocabulary, and their distributions are
widened once, all together. Otherwise as the fused drafts of models
(``runtime/executors/fused_draft.py``).

Legend: B rows, K tokens to read, N tokens, D draft vocabulary, S slots, H width of the head,
F width of the target times the layers read, V vocabulary of the target.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache

from outrider.core import draw
from outrider.core.chain import Choice, draft_chain, with_leaf
from outrider.core.health import health_of
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.eagle3_network import Eagle3Network
from outrider.drafters.heads.unread import Unread, at_last
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import QUERIES, ROWS, KVBuffers, TracedKVCache
from outrider.runtime.kv_cache.cache import KVCache
from outrider.sampling.warp import softmax_at


class HeadModule(nn.Module):
    """A head with embeddings and vocabulary: tokens and features in, logits of the target's
    vocabulary out.

    Args:
        network: the weights.
        embedding: the embeddings of the target's tokens.
        vocabulary: the tokens that the head drafts.
    """

    def __init__(
        self, network: Eagle3Network, embedding: nn.Module, vocabulary: DraftVocabulary
    ) -> None:
        super().__init__()
        self.network = network
        self.embedding = embedding
        self.dtype = network.lm_head.weight.dtype
        self.num_tokens = vocabulary.num_tokens
        self.register_buffer("target_ids_D", vocabulary.target_ids_D, persistent=False)

    def extra_repr(self) -> str:
        """All that a program of it depends on besides its parts (``compile_cache.py``)."""
        config = self.network.config
        flags = config.norm_before_residual, config.norm_before_fc, config.fc_norm
        return f"{flags}, {config.norm_output}, {self.num_tokens}"

    @property
    def config(self) -> LlamaConfig:
        """The decoder layer's."""
        return self.network.config.layer

    def set_attn_implementation(self, name: str) -> None:
        """Chooses the attention function of all layers, by its name in ``transformers``."""
        self.config._attn_implementation = name

    def forward(
        self,
        tokens_BN: Tensor,
        feature_BNH: Tensor,
        positions_BN: Tensor,
        mask_BNS: Tensor,
        cache: Cache,
    ) -> Tensor:
        """The head's outputs, (B, N, H); arguments as of :class:`Eagle3Network`."""
        output_BNH: Tensor = self.network(
            self.embedding(tokens_BN), feature_BNH, positions_BN, mask_BNS, cache
        )
        return output_BNH

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that the head drafts."""
        assert isinstance(self.target_ids_D, Tensor)
        return DraftVocabulary(self.target_ids_D, self.num_tokens)

    def logits(self, output_BNH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, N, V), -inf for tokens that the head cannot draft, and their health (B,)."""
        logits_BND = self.network.logits(output_BNH)
        return self.vocabulary.widened(logits_BND), health_of(logits_BND)


class _HeadDraft(GreedyDraft):
    """What greedy and sampled drafts share. The choice of a token reads logits over the draft
    vocabulary, (B, D)."""

    @property
    def _vocabulary(self) -> DraftVocabulary:
        assert isinstance(self.module, HeadModule)
        return self.module.vocabulary

    @property
    def num_moving(self) -> int:
        return super().num_moving + 2

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        *moving, keys, values = super().inputs(buffers, rows, queries, span, slots)
        num_B = 1 + torch.arange(rows, device=moving[0].device) % queries
        return *moving, num_B, self._hidden(moving[0]), keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS}, {0: ROWS, 1: QUERIES}

    def roots(self, inputs: Sequence[Any]) -> Tensor:
        num_B = inputs[self.num_moving - 2]
        return at_last(inputs[0][..., None], num_B)[:, 0, 0]

    def fill(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        assert isinstance(self.module, HeadModule)
        feature_BSH = self.module.network.fuse(self._hidden(tokens_BS))
        length_B = torch.zeros_like(tokens_BS[:, 0])
        self._read(tokens_BS, feature_BSH, length_B, tokens_BS.shape[1], keys, values)

    def _hidden(self, tokens_BN: Tensor) -> Tensor:
        """Various hidden states of the target for as many tokens, (B, N, F)."""
        assert isinstance(self.module, HeadModule)
        shape = *tokens_BN.shape, self.module.network.config.fused_size
        wave = (0.7 * torch.arange(math.prod(shape), device=tokens_BN.device)).sin()
        return wave.view(shape).to(self.dtype)

    def _read(
        self,
        tokens_BN: Tensor,
        feature_BNH: Tensor,
        length_B: Tensor,
        span: int,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """The head's outputs for tokens behind so many slots, (B, N, H)."""
        metadata = self.spec.metadata(length_B, tokens_BN.shape[1], span)
        cache = TracedKVCache(keys, values, metadata.slots_BN, span)
        (mask,) = metadata.masks.values()
        output_BNH: Tensor = self.module(tokens_BN, feature_BNH, metadata.positions_BN, mask, cache)
        return output_BNH

    def _head_chain(
        self, tokens_BK: Tensor, length_B: Tensor, rest: Any, choose: Choice
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What is recorded of each token; the sum of the logits' health (B,); the chain (B, N); the
        head's output for the root (B, H)."""
        num_B, hidden_BKF, slot_S, keys, values = rest
        assert isinstance(self.module, HeadModule)
        module, span = self.module, slot_S.shape[0]
        health: list[Tensor] = []

        def read(tokens_BN: Tensor, feature_BNH: Tensor) -> Tensor:
            return self._read(tokens_BN, feature_BNH, length_B, span, keys, values)

        root_B1H = feature_B1H = at_last(read(tokens_BK, module.network.fuse(hidden_BKF)), num_B)
        length_B = length_B + num_B

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal feature_B1H, length_B
            if health:
                feature_B1H = read(tokens[-1][:, None], feature_B1H)
                length_B = length_B + 1
            logits_B1D = module.network.logits(feature_B1H)
            health.append(health_of(logits_B1D))
            return logits_B1D[:, -1].to(torch.promote_types(logits_B1D.dtype, torch.float32))

        root_B = at_last(tokens_BK[..., None], num_B)[:, 0, 0]
        tokens, recorded = draft_chain(root_B, self.depth, step, choose)
        return recorded, torch.stack(health).sum(0), torch.stack(tokens, 1), root_B1H[:, 0]


class GreedyHeadDraft(_HeadDraft):
    """The argmax chain."""

    kind: ClassVar[str] = "greedy draft"

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        num_B: Tensor,
        hidden_BKF: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``GreedyDraft``, but the logits are over the draft vocabulary, and a last result is
        the head's output for the root, (B, H).

        Args:
            tokens_BK: tokens that the head has not read, each row's first ``num_B``, root last.
            length_B: slots that the cache holds.
            slot_S: as many numbers as there are slots to read.
            num_B: how many tokens each row reads; the root comes first where these are none.
            hidden_BKF: the target's hidden states at the token before each.
            keys, values: of the head's layers.
        """
        target_ids_D = self._vocabulary.target_ids_D
        rest = num_B, hidden_BKF, slot_S, keys, values
        recorded, *others = self._head_chain(
            tokens_BK, length_B, rest, lambda z_BD, _: (z_BD, target_ids_D[z_BD.argmax(-1)])
        )
        return with_leaf(recorded), *others

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        best = rows_BDV.gather(2, self._vocabulary.draft_ids(tokens_BD)[..., None])[..., 0]
        return torch.equal(best, rows_BDV.amax(2))


class SampledHeadDraft(_HeadDraft, SampledDraft):
    """A chain drawn at each row's temperature."""

    kind: ClassVar[str] = "sampled draft"

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        temperature_B: Tensor,
        u_BD: Tensor,
        num_B: Tensor,
        hidden_BKF: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``SampledDraft``, and a last result is the head's output for the root, (B, H); the
        other arguments are those of :class:`GreedyHeadDraft`."""
        vocabulary = self._vocabulary

        def choose(z_BD: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_BD = softmax_at(z_BD, temperature_B)
            return q_BD, vocabulary.target_ids_D[draw(q_BD, u_BD[:, len(tokens) - 1])]

        rest = num_B, hidden_BKF, slot_S, keys, values
        recorded, *others = self._head_chain(tokens_BK, length_B, rest, choose)
        return vocabulary.widened(with_leaf(recorded), outside=0.0), *others

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        rows = rows_BDV[..., self._vocabulary.target_ids_D]
        return super().follows(inputs, rows, self._vocabulary.draft_ids(tokens_BD))


class HeadExecutor(CompiledExecutor):
    """Runs a head's drafts by compiled programs; its other passes run eagerly."""

    runs_forwards = False

    def draft_behind(
        self,
        cache: KVCache,
        unread: Unread,
        depth: int,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> list[Tensor] | None:
        """Drafts after tokens that the head has not read; other arguments as of
        ``CompiledExecutor.draft``, results as of :class:`GreedyHeadDraft`."""
        if not cache.make_room():
            return None
        with self._lock:
            if depth not in self._drafts:
                arguments = self._module, self._spec, depth
                self._drafts[depth] = GreedyHeadDraft(*arguments), SampledHeadDraft(*arguments)
        greedy, sampled = self._drafts[depth]
        first = [unread.tokens_BK, cache.length_B, self._slots(cache)]
        last = [unread.num.device_B, unread.hidden_BKF]
        if temperature_B is None or u_BD is None:
            return self._run(greedy, cache, lambda: [*first, *last])
        return self._run(sampled, cache, lambda: [*first, temperature_B, u_BD, *last])
