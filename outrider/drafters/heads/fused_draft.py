"""A draft of an EAGLE-3 head as one program: no Python between its tokens.

The first token follows from the head's output for the root, which the program is given; each other
token takes one pass of the head over the token before it. Otherwise as the fused drafts of models
(``runtime/executors/fused_draft.py``).

Legend: B rows, N tokens, D draft vocabulary, S slots, H width of the head, V vocabulary of the
target.
"""

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
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_draft import GreedyDraft, SampledDraft
from outrider.runtime.executors.traced import ROWS, KVBuffers, TracedKVCache
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
        return super().num_moving + 1

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        *moving, keys, values = super().inputs(buffers, rows, queries, span, slots)
        assert isinstance(self.module, HeadModule)
        H = self.module.config.hidden_size
        last_BH = torch.linspace(-1, 1, rows * H, device=moving[0].device).view(rows, H)
        return *moving, last_BH.to(self.dtype), keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS}

    def _chain(
        self, tokens_BN: Tensor, length_B: Tensor, rest: Any, choose: Choice
    ) -> tuple[Tensor, Tensor, Tensor]:
        last_BH, slot_S, keys, values = rest
        assert isinstance(self.module, HeadModule)
        module, span = self.module, slot_S.shape[0]
        feature_B1H = last_BH[:, None]
        health: list[Tensor] = []

        def step(tokens: Sequence[Tensor]) -> Tensor:
            nonlocal feature_B1H, length_B
            if health:
                metadata = self.spec.metadata(length_B, 1, span)
                cache = TracedKVCache(keys, values, metadata.slots_BN, span)
                read_B1, (mask,) = tokens[-1][:, None], metadata.masks.values()
                feature_B1H = module(read_B1, feature_B1H, metadata.positions_BN, mask, cache)
                length_B = length_B + 1
            logits_B1D = module.network.logits(feature_B1H)
            health.append(health_of(logits_B1D))
            return logits_B1D[:, -1].to(torch.promote_types(logits_B1D.dtype, torch.float32))

        tokens, recorded = draft_chain(tokens_BN[:, -1], self.depth, step, choose)
        return with_leaf(recorded), torch.stack(health).sum(0), torch.stack(tokens, 1)


class GreedyHeadDraft(_HeadDraft):
    """The argmax chain."""

    kind: ClassVar[str] = "greedy draft"

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        last_BH: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``GreedyDraft``; ``last_BH`` is the head's output for the root, which is the last of
        the tokens, and ``length_B`` counts the slots that the cache holds."""
        vocabulary = self._vocabulary

        def choose(z_BD: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return vocabulary.widened(z_BD[:, None])[:, 0], vocabulary.target_ids_D[z_BD.argmax(-1)]

        return self._chain(tokens_BN, length_B, (last_BH, slot_S, keys, values), choose)


class SampledHeadDraft(_HeadDraft, SampledDraft):
    """A chain drawn at each row's temperature."""

    kind: ClassVar[str] = "sampled draft"

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        temperature_B: Tensor,
        u_BD: Tensor,
        last_BH: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As ``SampledDraft``; ``last_BH`` as of :class:`GreedyHeadDraft`."""

        vocabulary = self._vocabulary

        def choose(z_BD: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_BD = softmax_at(z_BD, temperature_B)
            q_BV = vocabulary.widened(q_BD[:, None], outside=0.0)[:, 0]
            return q_BV, draw(q_BV, u_BD[:, len(tokens) - 1])

        return self._chain(tokens_BN, length_B, (last_BH, slot_S, keys, values), choose)


class HeadExecutor(CompiledExecutor):
    """Runs a head's drafts by compiled programs; its other passes run eagerly."""

    runs_forwards = False

    def draft_behind(
        self,
        cache: KVCache,
        root_B1: Tensor,
        last_BH: Tensor,
        depth: int,
        temperature_B: Tensor | None,
        u_BD: Tensor | None,
    ) -> list[Tensor] | None:
        """Drafts after a root; arguments and results as of ``CompiledExecutor.draft``, and
        ``last_BH`` as of :class:`GreedyHeadDraft`."""
        if not cache.make_room():
            return None
        with self._lock:
            if depth not in self._drafts:
                arguments = self._module, self._spec, depth
                self._drafts[depth] = GreedyHeadDraft(*arguments), SampledHeadDraft(*arguments)
        greedy, sampled = self._drafts[depth]
        inputs = [root_B1, cache.length_B, self._slots(cache)]
        if temperature_B is None or u_BD is None:
            return self._run(greedy, cache, lambda: [*inputs, last_BH])
        return self._run(sampled, cache, lambda: [*inputs, temperature_B, u_BD, last_BH])
