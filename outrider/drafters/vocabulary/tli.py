"""Token-level intersection: a draft model with another vocabulary drafts the shared tokens.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", ICML 2025, Algorithm 4 (there q is the target, p the draft).

    q'(x) = q(x) / Σ_{y in both} q(y)   for x in both vocabularies, else 0;   x ~ q'

and q' is verified against the full p like any other draft. The restriction precedes the request's
sampling parameters (temperature, top-k, …), which are applied under the target's ids: bias and
penalties reach the draft too. α = Σ_{x in both} min(p, q').

Tokens are equal if they stand for the same bytes of text (``runtime/hf/vocabulary.py``), not if
their spellings are equal as in ``AssistantToTargetTranslator`` of transformers. With equal
vocabularies this is speculative decoding, token for token.

A committed token that the draft model lacks is converted to its tokens of the same text.

Proposes: i.i.d. chains.

Legend: B rows, N nodes, V the target's vocabulary, U the draft model's.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Acceptance, Budget, Context, Draft, Prefix, Scores, Stream
from outrider.drafters.chain.model import ModelDrafter, ModelState
from outrider.drafters.vocabulary.follow import DraftRow, Follower, FollowState
from outrider.runtime import HFModel
from outrider.runtime.hf.vocabulary_bridge import Bridge, Shared


class TliDrafter(Follower, ModelDrafter):
    """Samples a chain of shared tokens from a draft model.

    Args:
        target: the model that verifies.
        model: the draft model, with a tokenizer of its own.
        confidence: stop a row after a token with a smaller probability; 0 never stops.

    Raises:
        VocabularyMismatchError: a model without a tokenizer, or no token in common.
        InvalidParameterError: a confidence outside [0, 1].
    """

    def __init__(self, target: HFModel, model: HFModel, confidence: float = 0.0) -> None:
        ModelDrafter.__init__(self, model, target.num_tokens, confidence)
        self.bridge = Bridge(target, model)
        self.shared = Shared(self.bridge, model.device)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = ModelDrafter.propose(self, state, context, budget, rng)
        assert isinstance(state, FollowState)
        if draft.num_nodes == 1:
            return draft
        room_B = self._room_B(state, context.device)
        return replace(draft, mask_BN=draft.mask_BN & (draft.depth_BN <= room_B[:, None]))

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Remembers what was drafted; the next draft compares it with the committed sequence."""
        assert isinstance(state, FollowState)
        if draft.num_nodes > 1:
            state.drafted(self.shared.to_draft(draft.tokens_BN[:, 1:]).tolist())

    def _append(self, row: DraftRow, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        converted, row.pending = self.bridge.convert(tokens, row.pending)
        row.tokens += converted

    def _step(self, state: ModelState, x_B: Tensor) -> Tensor:
        return super()._step(state, self.shared.to_draft(x_B))

    def _row(self, logits_BU: Tensor, prefix: Prefix) -> Tensor:
        row_BV = super()._row(self.shared.logits(logits_BU), prefix)
        return self._restricted(row_BV, prefix.context.distribution.greedy)

    def _restricted(self, row_BV: Tensor, greedy: bool) -> Tensor:
        """The row restricted to shared tokens again: a bias or a processor may raise tokens that
        only the target has, or forbid all shared ones. A distribution without mass becomes uniform;
        a row that needs no change keeps its exact values."""
        shared_V = self.shared.is_shared_V
        if greedy:
            lowest = torch.finfo(row_BV.dtype).min
            return row_BV.clamp(min=lowest).masked_fill(~shared_V, -torch.inf)
        kept_BV = row_BV.masked_fill(~shared_V, 0.0)
        total_B1 = kept_BV.sum(-1, keepdim=True)
        uniform_V = shared_V.to(row_BV.dtype) / shared_V.sum()
        kept_BV = torch.where(total_B1 > 0, kept_BV / total_B1, uniform_V)
        within_B1 = row_BV.masked_fill(shared_V, 0.0).sum(-1, keepdim=True) == 0
        return torch.where(within_B1 & (total_B1 > 0), row_BV, kept_BV)
