"""A draft of a head as one program: no Python between its tokens.

The program first reads the tokens that the last round emitted, with the target's hidden states;
how the head drafts after them is the head's part (:class:`HeadProgram`). Tokens are drawn within
the draft vocabulary, and their distributions are widened once, all together. Otherwise as the fused
drafts of models (``runtime/executors/fused_draft.py``).

Legend: B rows, K tokens to read, N tokens, D draft vocabulary, S slots, H width of the head,
F width of the target's hidden states side by side, V vocabulary of the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from outrider.core import draw
from outrider.core.chain import Choice, Step, draft_chain, with_leaf
from outrider.core.health import health_of
from outrider.drafters.heads.draft_vocabulary import DraftVocabulary
from outrider.drafters.heads.newest import Newest, at_last
from outrider.runtime.attention_metadata import AttentionSpec
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_draft import (
    ChainPlan,
    DraftPlan,
    GreedyDraft,
    SampledDraft,
)
from outrider.runtime.executors.traced import QUERIES
from outrider.runtime.executors.traced_cache import ROWS, KVBuffers
from outrider.runtime.kernels.truncation import truncated
from outrider.runtime.kv_cache.cache import KVCache
from outrider.sampling.warp import DraftParameters, draft_distributions


class Slots(NamedTuple):
    """The KV buffers that a head writes and reads.

    Attributes:
        length_B: slots that hold committed tokens.
        span: slots that are read.
        keys, values: by layer.
    """

    length_B: Tensor
    span: int
    keys: list[Tensor]
    values: list[Tensor]


class HeadProgram(Protocol):
    """What a program consists of: a head with embeddings and vocabulary.

    Attributes:
        vocabulary: the tokens that the head drafts.
        fused_size: F.
    """

    @property
    def vocabulary(self) -> DraftVocabulary: ...
    @property
    def fused_size(self) -> int: ...

    def num_drafting(self, depth: int) -> int:
        """Slots that a draft of so many tokens takes after the newest ones."""

    def fill(self, spec: AttentionSpec, tokens_BS: Tensor, hidden_BSF: Tensor, to: Slots) -> None:
        """Writes the keys and values of tokens to all slots."""

    def begin_draft(
        self,
        spec: AttentionSpec,
        tokens_BK: Tensor,
        hidden_BKF: Tensor,
        num_B: Tensor,
        slots: Slots,
    ) -> tuple[Step, Tensor]:
        """Reads the newest tokens; returns what computes the logits over the draft vocabulary
        after drafted tokens, each (B, 1, D), and the head's output for the root, (B, H).

        Args:
            spec: what positions and masks depend on.
            tokens_BK, hidden_BKF, num_B: as of ``Newest``.
            slots: the KV buffers.
        """


class HeadDraft(GreedyDraft):
    """What greedy and sampled drafts share. The choice of a token reads logits over the draft
    vocabulary, (B, D). ``depth`` is how many tokens are drafted."""

    @property
    def _head(self) -> HeadProgram:
        return cast(HeadProgram, self.module)

    @property
    def num_slots(self) -> int:
        """Slots that the draft takes after the newest tokens."""
        return self._head.num_drafting(self.depth)

    @property
    def num_moving(self) -> int:
        return super().num_moving + 2

    def inputs(
        self, buffers: KVBuffers, rows: int, queries: int, span: int, slots: int
    ) -> tuple[Any, ...]:
        more = self.num_slots - self.num_later
        arguments = buffers, rows, queries, span + more, slots + more
        tokens_BN, length_B, *moving, keys, values = super().inputs(*arguments)
        num_B = 1 + torch.arange(rows, device=tokens_BN.device) % queries
        hidden_BNF = self._hidden(tokens_BN)
        return tokens_BN, length_B - more, *moving, num_B, hidden_BNF, keys, values

    def sizes(self) -> tuple[Any, ...]:
        return *super().sizes(), {0: ROWS}, {0: ROWS, 1: QUERIES}

    def roots(self, inputs: Sequence[Any]) -> Tensor:
        *_, num_B, _, _, _ = inputs  # before hidden states, keys and values
        return at_last(inputs[0][..., None], num_B)[:, 0, 0]

    def fill(self, tokens_BS: Tensor, keys: list[Tensor], values: list[Tensor]) -> None:
        slots = Slots(torch.zeros_like(tokens_BS[:, 0]), tokens_BS.shape[1], keys, values)
        self._head.fill(self.spec, tokens_BS, self._hidden(tokens_BS), slots)

    def _hidden(self, tokens_BN: Tensor) -> Tensor:
        """Various hidden states of the target for as many tokens, (B, N, F)."""
        shape = *tokens_BN.shape, self._head.fused_size
        wave = (0.7 * torch.arange(math.prod(shape), device=tokens_BN.device)).sin()
        return wave.view(shape).to(self.dtype)

    def _head_chain(
        self, tokens_BK: Tensor, length_B: Tensor, rest: Any, choose: Choice
    ) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """What is recorded of each token; the sum of the logits' health (B,); the chain (B, N); the
        head's output for the root (B, H)."""
        num_B, hidden_BKF, slot_S, keys, values = rest
        slots = Slots(length_B, slot_S.shape[0], keys, values)
        after, last_BH = self._head.begin_draft(self.spec, tokens_BK, hidden_BKF, num_B, slots)
        health: list[Tensor] = []

        def step(tokens: Sequence[Tensor]) -> Tensor:
            logits_B1D = after(tokens)
            health.append(health_of(logits_B1D))
            return logits_B1D[:, -1].to(torch.promote_types(logits_B1D.dtype, torch.float32))

        root_B = at_last(tokens_BK[..., None], num_B)[:, 0, 0]
        tokens, recorded = draft_chain(root_B, self.depth, step, choose)
        return recorded, torch.stack(health).sum(0), torch.stack(tokens, 1), last_BH


class GreedyHeadDraft(HeadDraft):
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
            tokens_BK: the newest tokens, each row's first ``num_B``, root last.
            length_B: slots that the cache holds.
            slot_S: as many numbers as there are slots to read.
            num_B: how many tokens each row reads; the root comes first where these are none.
            hidden_BKF: the target's hidden states at the token before each.
            keys, values: of the head's layers.
        """
        target_ids_D = self._head.vocabulary.target_ids_D
        rest = num_B, hidden_BKF, slot_S, keys, values
        recorded, *others = self._head_chain(
            tokens_BK, length_B, rest, lambda z_BD, _: (z_BD, target_ids_D[z_BD.argmax(-1)])
        )
        return with_leaf(recorded), *others

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        best = rows_BDV.gather(2, self._head.vocabulary.draft_ids(tokens_BD)[..., None])[..., 0]
        return torch.equal(best, rows_BDV.amax(2))


class SampledHeadDraft(HeadDraft, SampledDraft):
    """A chain drawn under each row's sampling parameters."""

    kind: ClassVar[str] = "sampled draft"

    @property
    def num_tokens(self) -> int:
        return self._head.vocabulary.num_tokens

    def forward(  # type: ignore[override]
        self,
        tokens_BK: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        parameters: Sequence[Tensor],
        u_BD: Tensor,
        num_B: Tensor,
        hidden_BKF: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """As ``SampledDraft``, and a last result is the head's output for the root, (B, H); the
        other arguments are those of :class:`GreedyHeadDraft`."""
        vocabulary = self._head.vocabulary

        def choose(z_BD: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_BD = self.after_chain(z_BD, parameters, tokens)
            return q_BD, vocabulary.target_ids_D[draw(q_BD, u_BD[:, len(tokens) - 1])]

        rest = num_B, hidden_BKF, slot_S, keys, values
        recorded, *others = self._head_chain(tokens_BK, length_B, rest, choose)
        return vocabulary.widened(with_leaf(recorded), outside=0.0), *others

    def tokens_of(self, z_BV: Tensor) -> Tensor:
        return self._head.vocabulary.target_ids_D

    def drawn_from(
        self, z_BnV: Tensor, parameters: Sequence[Tensor], drafted_BnV: Tensor
    ) -> Tensor:
        """As of ``SampledDraft``, over the draft vocabulary."""
        by = DraftParameters(*parameters).among(self._head.vocabulary.target_ids_D)
        return draft_distributions(z_BnV, by, drafted_BnV, truncated)

    def follows(self, inputs: Sequence[Any], rows_BDV: Tensor, tokens_BD: Tensor) -> bool:
        rows = rows_BDV[..., self._head.vocabulary.target_ids_D]
        return super().follows(inputs, rows, self._head.vocabulary.draft_ids(tokens_BD))


@dataclass(frozen=True)
class HeadChainPlan(ChainPlan):
    """A head's chain of ``depth`` tokens."""

    def programs(self, module: nn.Module, spec: AttentionSpec) -> tuple[GreedyDraft, SampledDraft]:
        return GreedyHeadDraft(module, spec, self.depth), SampledHeadDraft(module, spec, self.depth)


class HeadExecutor(CompiledExecutor):
    """Runs a head's drafts by compiled programs; its other passes run eagerly."""

    runs_forwards = False

    def draft_after(
        self,
        cache: KVCache,
        newest: Newest,
        plan: DraftPlan,
        parameters: DraftParameters | None,
        u_BD: Tensor | None,
    ) -> list[Tensor] | None:
        """Reads the newest tokens and drafts after them; other arguments as of
        ``CompiledExecutor.draft``, results as of :class:`GreedyHeadDraft`, with the nodes that
        exist after the tokens of a tree."""
        with self._lock:
            if plan not in self._drafts:
                self._drafts[plan] = plan.programs(self._module, self._spec)
        greedy, sampled = self._drafts[plan]
        assert isinstance(greedy, HeadDraft)
        cache.begin(newest.tokens_BK.shape[1] + greedy.num_slots)
        if not cache.make_room():
            return None
        first = [newest.tokens_BK, cache.length_B, self._slots(cache)]
        last = [newest.num.device_B, newest.hidden_BKF]
        if parameters is None or u_BD is None:
            return self._run(greedy, cache, lambda: [*first, *last])
        return self._run(sampled, cache, lambda: [*first, *parameters, u_BD, *last])
