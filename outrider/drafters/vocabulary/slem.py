"""String-level exact match: a draft model with another vocabulary drafts text, which the target's
tokenizer turns into candidates.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", ICML 2025, Algorithm 2; transformers' assisted generation with two
tokenizers and ``do_sample=False``.

    text = D(x_1 … x_γ),   x_i = argmax q_i;     candidates = T(text)

T tokenises the drafted text together with the last committed tokens before it; the candidates are
the tokens after these. A rule that verifies chosen candidates accepts those that the target itself
would emit, so the method is lossless whatever the text. The argmax is drafted at every temperature:
if q is near p, no draw agrees with the target's draw more often. Bias and penalties are about
tokens of the target and do not reach the draft model.

The draft model reads the committed text in its own tokens: the tokens that it drafted itself, as
long as they agree with the text, then the remaining text, tokenised together with the last tokens
before it. (transformers looks for the longest diagonal of equal tokens instead.)

Proposes: chosen chains.

Legend: B rows, N nodes, K drafted tokens, V the target's vocabulary, U the draft model's.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby, takewhile

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drawn, Stream
from outrider.core.errors import InvalidParameterError
from outrider.drafters.vocabulary.follow import NUM_REREAD, DraftRow, Follower, FollowState
from outrider.runtime import HFModel
from outrider.runtime.hf.vocabulary import complete
from outrider.runtime.hf.vocabulary_bridge import Bridge


class SlemDrafter(Follower):
    """Drafts candidates from the text of a draft model.

    Args:
        target: the model that verifies.
        model: the draft model, with a tokenizer of its own.
        confidence: stop a row after a draft token with a smaller probability; 0 never stops.

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
        InvalidParameterError: a confidence outside [0, 1].
    """

    drawn: Drawn = "chosen"

    def __init__(self, target: HFModel, model: HFModel, confidence: float = 0.0) -> None:
        if not 0 <= confidence <= 1:
            raise InvalidParameterError(
                f"draft_confidence={confidence!r}: must be in [0, 1]; 0 never stops early"
            )
        super().__init__(model, target.num_tokens)
        self.bridge = Bridge(target, model)
        self.confidence = confidence
        self._target_ids = self.bridge.target_ids
        pieces = self.bridge.draft.pieces
        usable = [bool(piece) or token in self._target_ids for token, piece in enumerate(pieces)]
        self._unusable_U = ~torch.tensor(usable, device=model.device)

    def propose(self, state: FollowState, context: Context, budget: Budget, rng: Stream) -> Draft:
        if not budget.max_tokens:
            return Draft.root_only(context.root_B)
        most_B = torch.full_like(context.length_B, budget.max_tokens)
        most_B = most_B if budget.tokens_B is None else budget.tokens_B
        written = self._write(state, context, most_B, budget.max_tokens).tolist()
        state.drafted([tokens[:num] for _, num, *tokens in written])
        rows = zip(state.rows, written, strict=True)
        return _chain(context.root_B, [self._candidates(row)[:most] for row, (most, *_) in rows])

    def _write(
        self, state: FollowState, context: Context, most_B: Tensor, num_tokens: int
    ) -> Tensor:
        """Drafts the argmax chain. Per row, (B, 2 + K): most candidates, how many of the draft
        model's tokens count, and these tokens."""
        tokens: list[Tensor] = []
        going_B = torch.ones_like(most_B, dtype=torch.bool)
        num_B = torch.zeros_like(most_B)
        for i in range(num_tokens):
            logits_BU = self._step(state, tokens[-1]) if i else self._catch_up(state, context)
            if not i:
                most_B = most_B.minimum(self._room_B(state, context.device))
            logits_BU = logits_BU.masked_fill(self._unusable_U, -torch.inf)
            best_B = logits_BU.argmax(-1)
            tokens.append(best_B)
            going_B = going_B & (most_B > i)
            num_B = num_B + going_B
            if self.confidence:
                q_BU = logits_BU.to(torch.promote_types(logits_BU.dtype, torch.float32)).softmax(-1)
                going_B = going_B & (q_BU.gather(1, best_B[:, None])[:, 0] >= self.confidence)
                if not bool(going_B.any()):
                    break
        return torch.stack([most_B, num_B, *tokens], 1)

    def _candidates(self, row: DraftRow) -> list[int]:
        """The drafted text in the target's tokens, up to the token that ends the output."""
        if row.pending:
            return []
        target, draft = self.bridge.target, self.bridge.draft
        textual = list(takewhile(lambda token: draft.pieces[token], row.drafted))
        text = complete(draft.bytes_of(textual))[0]
        before = complete(target.bytes_of(row.tail))[0]
        ending = row.drafted[len(textual) : len(textual) + 1]
        found = target.spell(text, before) if text else []
        return found + [self._target_ids[token] for token in ending if token in self._target_ids]

    def _append(self, row: DraftRow, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        target, waiting = self.bridge.target, deque(drafted)
        for special, run in groupby(tokens, target.is_special):
            if special:
                converted, row.pending = self.bridge.convert(list(run), b"")
                row.tokens += converted
                waiting.clear()
            else:
                self._append_text(row, row.pending + target.bytes_of(list(run)), waiting)

    def _append_text(self, row: DraftRow, utf8: bytes, drafted: deque[int]) -> None:
        """Appends text: the drafted tokens while they agree with it, then the remaining text."""
        draft = self.bridge.draft
        while drafted and draft.pieces[drafted[0]] and utf8.startswith(draft.pieces[drafted[0]]):
            utf8 = utf8[len(draft.pieces[drafted[0]]) :]
            row.tokens.append(drafted.popleft())
        row.pending = b""
        if not utf8:
            return
        drafted.clear()
        first = self._first_open(row.tokens)
        text, row.pending = complete(draft.bytes_of(row.tokens[first:]) + utf8)
        before = complete(draft.bytes_of(row.tokens[max(0, first - NUM_REREAD) : first]))[0]
        again = draft.encode_after(before, text)
        if again is not None:
            row.tokens[first:] = again
            return
        text, row.pending = complete(utf8)
        row.tokens += draft.spell(text) if text else []

    def _first_open(self, tokens: Sequence[int]) -> int:
        """Index of the first token that may be tokenised again: after the last special token, and
        at the beginning of a character."""
        pieces = self.bridge.draft.pieces
        first = len(tokens)
        while first > max(0, len(tokens) - NUM_REREAD) and pieces[tokens[first - 1]]:
            first -= 1
        while first < len(tokens) and pieces[tokens[first]][0] & 0xC0 == 0x80:
            first += 1
        return first


def _chain(root_B: Tensor, texts: Sequence[Sequence[int]]) -> Draft:
    K = max(map(len, texts))
    padded = [[*text, *[0] * (K - len(text))] for text in texts]
    exists = [[True] * (1 + len(text)) + [False] * (K - len(text)) for text in texts]
    tokens_BK = torch.tensor(padded, dtype=torch.int64, device=root_B.device).view(len(texts), K)
    tokens_BN = torch.cat([root_B[:, None], tokens_BK], 1)
    return Draft.chain(tokens_BN, torch.tensor(exists, device=root_B.device), None, "chosen")
