"""A draft model that follows the target's output in tokens of its own vocabulary.

The host converts what the target commits into the draft model's tokens, row by row (``_append``,
which each drafter implements). The draft model's cache keeps the tokens that stay the same, drafted
ones included, and is rolled back to the first that differs: ``cached`` is the length of the common
prefix of the cache's tokens and the row's tokens.

Reads two small tensors from the device per round: the drafted tokens, and those committed since.

Legend: B rows, K tokens fed or drafted, T context length, U the draft model's vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from outrider.core import Acceptance, Capabilities, Context, Draft, Lengths, Scores
from outrider.drafters.chain.model import BACKLOG_WIDTH, ModelBacked, ModelState
from outrider.runtime import HFModel, KVCache
from outrider.runtime.hf.vocabulary_bridge import Bridge
from outrider.runtime.prefill import Prefilling

NUM_REREAD = 10
"""How many tokens before appended text may be tokenised again together with it."""


@dataclass
class DraftRow:
    """One row's committed sequence in the draft model's tokens.

    Attributes:
        tokens: the draft model's tokens for all committed sequence but ``pending``; never empty.
        known: how many of the target's tokens have been converted.
        tail: the target's last tokens.
        cached: how many of ``tokens`` the cache holds.
        pending: bytes of a last character that is not complete yet.
        drafted: the draft model's tokens that were drafted after ``tokens``.
        fed: how many of ``drafted`` the cache holds after ``tokens``.
    """

    tokens: list[int]
    known: int
    tail: list[int]
    cached: int
    pending: bytes = b""
    drafted: list[int] = field(default_factory=list)
    fed: int = 0


class FollowState(ModelState):
    """The draft model's cache, and the committed sequence in the draft model's tokens.

    Attributes:
        rows: one per row.
    """

    def __init__(self, cache: KVCache, rows: list[DraftRow]) -> None:
        super().__init__(cache)
        self.rows = rows

    @property
    def fed(self) -> int:
        """How many drafted tokens of each row the cache holds."""
        return self.cache.lengths[0] - len(self.rows[0].tokens)

    def drafted(self, tokens: Sequence[list[int]]) -> None:
        """Remembers what was drafted in each row."""
        for row, own in zip(self.rows, tokens, strict=True):
            row.drafted, row.fed = own, min(self.fed, len(own))

    def follow_rows(self) -> None:
        """Writes the rows' tokens to the cache's context: a cache may drop what lies before them,
        read them again, and retain them for later prompts."""
        context = self.cache.context
        lengths = [len(row.tokens) for row in self.rows]
        tokens_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, own in enumerate(self.rows):
            tokens_BT[row, : lengths[row]] = torch.tensor(own.tokens)
        context.follow(tokens_BT.to(context.device), Lengths.of(lengths, context.device))

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
        self.cache.context.keep(rows)
        self.rows = [self.rows[row] for row in rows]

    def rollback(self, lengths: Lengths) -> None:
        """Nothing: the next draft compares the cache with the committed sequence, whose tokens
        ``lengths`` does not count."""


class Follower(ModelBacked, ABC):
    """Shared by drafters whose model has a vocabulary of its own.

    Attributes:
        bridge: converts between the target's vocabulary and the draft model's.
    """

    bridge: Bridge

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return replace(
            super().capabilities,
            reviews=False,
            starts_late=False,
            handles_context_limit=True,
            rewindable=False,
            own_vocabulary=True,
        )

    def begin(self, context: Context) -> Prefilling:
        tokens_BT = context.tokens_BT.tolist()
        rows_and_lengths = zip(tokens_BT, context.lengths, strict=True)
        prompts = [tuple(row[:length]) for row, length in rows_and_lengths]
        begun = {prompt: self._begin(prompt)[: self.model.limit] for prompt in {*prompts}}
        converted = [list(begun[prompt]) for prompt in prompts]
        rows = [
            DraftRow(tokens, len(prompt), list(prompt[-NUM_REREAD:]), len(tokens) - 1)
            for tokens, prompt in zip(converted, prompts, strict=True)
        ]
        zeros = [0] * len(rows)
        sources = context.sources
        if sources is not None:
            longest = self.model.limit
            sources = [tuple(self.bridge.translate(source)[:longest]) for source in sources]
        own = Context.start(converted, context.distribution, zeros, zeros, context.device, sources)
        own.health = context.health
        prefill = self.model.begin(own)
        return Prefilling(FollowState(prefill.cache, rows), [prefill])

    def commit(self, state: ModelState, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        """Nothing: the next draft reads the context, and compares the cache with it."""

    def join(self, state: ModelState, other: ModelState) -> None:
        super().join(state, other)
        assert isinstance(state, FollowState)
        assert isinstance(other, FollowState)
        state.cache.context.join(other.cache.context)
        state.rows = state.rows + other.rows

    def _begin(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft model's tokens; an encoder-decoder's begins with its decoder
        prompt."""
        if self.model.decoder_prompt is None:
            return self.bridge.translate(prompt)
        return [*self.model.decoder_prompt, *self.bridge.convert(prompt[1:], b"")[0]]

    @abstractmethod
    def _append(self, row: DraftRow, tokens: Sequence[int], drafted: Sequence[int]) -> None:
        """Appends committed tokens of the target to ``row.tokens``, converted. May tokenise the
        last ``NUM_REREAD`` tokens again; ``drafted`` is what the draft model drafted there."""

    def _catch_up(self, state: ModelState, context: Context) -> Tensor:
        """Feeds the committed tokens that the cache lacks; the draft model's logits after them,
        (B, U)."""
        assert isinstance(state, FollowState)
        self._follow(state, context)
        rows = state.rows
        state.cache.rollback(Lengths.of([row.cached for row in rows], context.device))
        while (missing := max(len(row.tokens) - row.cached for row in rows)) > BACKLOG_WIDTH:
            width = min(missing - 1, BACKLOG_WIDTH)
            kept = [min(width, len(row.tokens) - 1 - row.cached) for row in rows]
            self._feed(state, width, Lengths.of(kept, context.device), num_logits=1)
        lacking = [len(row.tokens) - row.cached for row in rows]
        kept_B = Lengths.of(lacking, context.device)
        logits_BKU = self._feed(state, missing, kept_B)
        last_B11 = (kept_B.device_B - 1)[:, None, None]
        return logits_BKU.gather(1, last_B11.expand(-1, 1, logits_BKU.shape[2]))[:, 0]

    def _feed(self, state: FollowState, K: int, kept: Lengths, num_logits: int = 0) -> Tensor:
        """Feeds K tokens, of which each row keeps those that are its own; the logits after the last
        ``num_logits`` of them, or after all."""
        rows = state.rows
        fed = [row.tokens[row.cached : row.cached + K] for row in rows]
        fed = [tokens + [0] * (K - len(tokens)) for tokens in fed]
        tokens_BK = torch.tensor(fed, device=kept.device_B.device)
        logits_BKU = self.model.extend(state.cache, tokens_BK, num_logits=num_logits)
        state.cache.append(kept)
        for row, num in zip(rows, kept.host, strict=True):
            row.cached += num
        return logits_BKU

    def _follow(self, state: FollowState, context: Context) -> None:
        """Converts what was committed since the last round, and finds how much the cache may
        keep."""
        first = min(row.known for row in state.rows)
        new_BK = context.tokens_BT[:, first : max(context.lengths)].tolist()
        for row, new, length in zip(state.rows, new_BK, context.lengths, strict=True):
            new = new[row.known - first : length - first]
            border = max(0, len(row.tokens) - NUM_REREAD)
            held = row.tokens[border : row.cached] + row.drafted[: row.fed]
            drafted, row.drafted, row.fed = row.drafted, [], 0
            if new and len(row.tokens) < self.model.limit:
                self._append(row, new, drafted)
                del row.tokens[self.model.limit :]
            row.known, row.tail = length, (row.tail + new)[-NUM_REREAD:]
            same = border + _common(held, row.tokens[border:])
            row.cached = min(same, len(row.tokens) - 1)
        state.follow_rows()

    def _room_B(self, state: FollowState, device: torch.device) -> Tensor:
        """How many more tokens each row has room for in the draft model's context, (B,). A row that
        fills the context goes on without drafts."""
        room = [self.model.limit - len(row.tokens) for row in state.rows]
        return torch.tensor(room, device=device)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two lists."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
